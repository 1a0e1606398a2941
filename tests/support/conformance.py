"""The algorithms that every general test runs: a new algorithm is one more line in `ALGORITHMS`."""

import jax
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples

ALGORITHMS = {
    "FedSGM hard": fs.FedSGM(0.05, 0.1, participants=3, local_steps=2),
    "FedSGM soft, Top-K both ways": fs.FedSGM(
        0.05,
        0.1,
        fs.Soft(5.0),
        participants=3,
        local_steps=2,
        uplink=fs.TopK(0.4),
        downlink=fs.TopK(0.4),
    ),
    "FedSGM unbiased uplink": fs.FedSGM(0.02, 0.1, uplink=fs.RandK(0.4), participants=3),
    "FedSGM quantised": fs.FedSGM(
        0.02,
        0.1,
        participants=3,
        uplink=fs.Compose(fs.TopK(0.6), fs.Float8()),
        downlink=fs.Float4(),
    ),
    "FedSGM, who is wanted, drawn and up": fs.FedSGM(
        0.05,
        0.1,
        weighting="FOLB",
        selection=fs.participation.Top(3),
        availability=0.7,
        local_steps=2,
        uplink=fs.TopK(0.4),
    ),
    "IncentFedAvg": fs.IncentFedAvg(
        examples.contribution_game(), 0.05, 2.0, local_steps=2, participants=3, uplink=fs.TopK(0.4)
    ),
    "FedSGM, strategic": fs.FedSGM(
        0.05,
        0.1,
        weighting=fs.Strategic(examples.contribution_game(), 2.0),
        selection=fs.participation.Proportional(3),
    ),
    "FedAvg": fs.FedAvg(0.05, participants=3, local_steps=2, weighting="DataSize"),
    "FedDyn": fs.FedDyn(0.03, regularization=1.0, participants=3, local_steps=2),
    "MOON": fs.MOON(0.05, contrast=0.1, participants=3, local_steps=2, uplink=fs.TopK(0.6)),
    "SCAFFOLD": fs.SCAFFOLD(0.03, participants=3, local_steps=2, uplink=fs.TopK(0.6)),
    "F3AST": fs.F3AST(0.02, participants=2, availability=0.7, weighting="DataSize"),
    "PPBC+": fs.PPBC(
        0.05,
        0.001,
        weighting="FOLB",
        select_epoch=fs.participation.Top(4),
        select_round=fs.participation.Top(2),
        round_weighting="PowerOfChoice",
        cap=4.0,
        availability=0.8,
    ),
    "FedADMM, Top-K": fs.FedADMM(
        participants=3, local_iterations=2, penalty=1.0, accuracy=1e-4, uplink=fs.TopK(0.6)
    ),
    "FedAvgAll": fs.FedAvgAll(0.05, participants=3, local_steps=2, uplink=fs.TopK(0.6)),
    "FedProx": fs.FedProx(0.05, participants=3, local_steps=2, proximity=0.1),
    "FedAlt": fs.FedAlt(0.05, participants=3, local_steps=2, personal_steps=1),
    "FedSim, Top-K": fs.FedSim(0.05, participants=3, local_steps=2, uplink=fs.TopK(0.6)),
    "PenaltyFedAvg": fs.PenaltyFedAvg(0.02, 0.1, rho=2.0, participants=3, local_steps=2),
    "LagrangianFedAvg": fs.LagrangianFedAvg(
        0.02,
        tolerance=0.1,
        dual_step=0.1,
        participants=3,
        local_steps=2,
        uplink=fs.TopK(0.6),
        downlink=fs.TopK(0.6),
    ),
    "SafeEF": fs.SafeEF(0.05, 0.1, uplink=fs.TopK(0.6), downlink=fs.TopK(0.6)),
    "QFedAvg": fs.QFedAvg(
        0.03,
        fairness=1.0,
        participants=3,
        local_steps=2,
        uplink=fs.TopK(0.6),
        downlink=fs.TopK(0.6),
    ),
    "AFL": fs.AFL(0.03, weight_step=0.01, participants=3, local_steps=2, uplink=fs.TopK(0.6)),
    "ProxAL": fs.ProxAL(0.05, 0.1, steps=3, local_steps=2),
    "MIFA": fs.MIFA(0.03, participants=3, local_steps=2, availability=0.8, uplink=fs.TopK(0.6)),
    "FedVARP, FedAdam": fs.FedVARP(
        0.03, participants=3, local_steps=2, server_optimizer=fs.AdaptiveStep("adam", 0.05)
    ),
    "FedNova": fs.FedNova(
        0.05,
        local_steps=2,
        weighting="GradientNorm",
        selection=fs.participation.Importance(3, floor=0.5),
        uplink=fs.TopK(0.6),
    ),
    "FedAMD": fs.FedAMD(0.03, participants=3, local_steps=3),
    "FedAvg, Oort": fs.FedAvg(
        0.05, weighting=fs.participation.Oort(3), selection=fs.participation.Top(3)
    ),
    "SCAFFOLD, DivFL": fs.SCAFFOLD(
        0.03, weighting=fs.participation.DivFL(3), selection=fs.participation.Top(3), local_steps=2
    ),
    "IPPConEx": fs.IPPConEx(0.05, 0.1, steps=4, participants=3),
}


# One of each kind. The costliest tests run for these; for the others they are `slow`.
KINDS = ("FedSGM soft, Top-K both ways", "SCAFFOLD", "PPBC+", "FedADMM, Top-K", "IncentFedAvg")


def every_algorithm(test, costly=False):
    """An algorithm's tests run in one process, where they share what is compiled."""
    cases = [
        pytest.param(
            algorithm,
            id=name,
            marks=[pytest.mark.xdist_group(name)]
            + ([pytest.mark.slow] if costly and name not in KINDS else []),
        )
        for name, algorithm in ALGORITHMS.items()
    ]
    return pytest.mark.parametrize("algorithm", cases)(test)


def every_algorithm_costly(test):
    return every_algorithm(test, costly=True)


def number(algorithm):
    """A number of the algorithm that can be changed without compiling anew."""
    return "step_size" if hasattr(algorithm, "step_size") else "penalty"


def assert_same(one, other, tolerance=0.0):
    """The same history and parameters: to the bit, or within a tolerance."""
    assert one.history.keys() == other.history.keys()
    for name in one.history:
        np.testing.assert_allclose(
            one.history[name], other.history[name], rtol=tolerance, atol=tolerance, err_msg=name
        )
    for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_equal(one, other):
    """The same trees of arrays, to the bit."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
