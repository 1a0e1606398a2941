"""FedADMM's theorems as functions, against runs of the method."""

import math

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.theory import fedadmm
from tests.support import examples


@pytest.mark.parametrize("penalty", [0.3, 0.6, 3.0])
def test_theorem_3_1_that_many_steps_are_enough(penalty):
    """(15) on random convex quadratics: the residual (6) is met after κ + 1 steps."""
    rng = np.random.default_rng(0)
    for accuracy in (1.0, 1e-3, 1e-9):
        root = rng.standard_normal((6, 6))
        hessian = root @ root.T
        hessian /= 2 * np.linalg.eigvalsh(hessian)[-1]  # α r = 1/2
        linear, w = rng.standard_normal((2, 6))
        best = np.linalg.solve(hessian + penalty * np.eye(6), penalty * w - linear)
        kappa = fedadmm.kappa(0.5, penalty, float(np.linalg.norm(w - best)), accuracy)
        v = w
        for _ in range(kappa + 1):
            v = (0.5 * v + penalty * w - hessian @ v - linear) / (0.5 + penalty)
        residual = hessian @ v + linear + penalty * (v - w)
        assert residual @ residual <= accuracy


def test_theorem_3_1_needs_a_penalty():
    with pytest.raises(fs.InvalidInput, match=r"needs a penalty above 0\.25"):
        fedadmm.kappa(0.5, 0.25, 1.0, 1.0)


def test_theorem_4_1_asks_for_three_times_the_smoothness():
    lipschitz = np.asarray([1.0, 2.0, 4.0])
    assert fedadmm.penalties_suffice(lipschitz, lipschitz)
    assert not fedadmm.penalties_suffice(0.99 * lipschitz, lipschitz)


def test_waiting_is_the_longest_time_without_a_client():
    assert fedadmm.waiting(np.asarray([[0, 1], [2, 0], [1, 2]]), 3) == 2
    assert fedadmm.waiting(np.asarray([[0], [1], [0]]), 2) == 2
    assert fedadmm.waiting(np.asarray([[0], [1]]), 3) == math.inf


def test_both_tests_and_both_counts():
    problem = examples.least_squares(constrained=False)
    clients = examples.least_squares_clients(problem)
    slope = np.mean([gradient(np.zeros(5)) for gradient, _, _ in clients], axis=0)
    literal = fedadmm.tolerance(problem)
    assert literal == pytest.approx(5 * 1e-3 * 5 / (6 * 48))
    assert fedadmm.tolerance(problem, test="code") == pytest.approx(36 * literal)
    assert fedadmm.tolerance(problem, accuracy=1e9) == pytest.approx(slope @ slope / 5, rel=1e-5)
    assert fedadmm.communication_rounds(7) == 14
    assert fedadmm.communication_rounds(7, count="code") == 7
    with pytest.raises(fs.InvalidInput, match='"paper" or "code"'):
        fedadmm.communication_rounds(7, count="mine")
