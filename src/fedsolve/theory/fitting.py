"""A guarantee for a given problem: known constants from the user, estimates for the others."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsolve.algorithms.guarantee import Guarantee
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_kind
from fedsolve.problem.domains import WholeSpace
from fedsolve.problem.problem import Problem
from fedsolve.theory.estimates import estimate, extent, mean_parts
from fedsolve.theory.fedsgm import NEAR, NO_PROJECTION, fedsgm

OF_THE_PROBLEM = ("rounds", "clients", "participants", "size")
CONSTANTS = [name for name in inspect.signature(fedsgm).parameters if name not in OF_THE_PROBLEM]


def fedsgm_for(
    problem: Problem,
    rounds: int,
    *,
    participants: int | None = None,
    points: int = 64,
    seed: int = 0,
    **known: Any,
) -> Guarantee:
    """Call `fedsgm` with n, d and X of the problem, and estimates of the constants not given.

    `unchecked` lists the estimates and the number of points that they come from.
    """
    check_kind("problem", problem, Problem)
    parts = mean_parts(problem)
    if participants is not None:
        check_count("participants", participants, most=problem.n)
    for name in known:
        if name not in CONSTANTS:
            raise InvalidInput(
                f"{name!r} is not a constant of the theorems: {', '.join(CONSTANTS)}."
            )
    given = {name: value for name, value in known.items() if value is not None}
    partial = participants is not None and participants < problem.n
    stochastic = problem.batch_size is not None
    weakly = "rho" in given
    if len(parts) > 1 and (partial or stochastic or weakly):
        raise InvalidInput(
            "For several constraints, theorems are about their maximum with all clients in every "
            "round, full batches, and convex functions: the error of a sampled maximum is not "
            "covered."
        )
    with jax.enable_x64(True):
        farthest, diameter = extent(problem.on_device(jnp.float64))
    known_facts: list[str] = []
    if "distance" not in given:
        if not np.isfinite(farthest):
            raise InvalidInput(
                "X is unbounded, so D is unknown: give distance, a bound on ‖w_0 − w*‖, or a "
                "bounded domain such as Ball."
            )
        by_diameter = partial or stochastic or weakly
        given["distance"] = diameter if by_diameter else farthest
        known_facts = [] if by_diameter else [NEAR]  # w* is in X
    if stochastic and "constraint_batch" in given and "constraint_noise" not in given:
        raise InvalidInput(
            "constraint_batch is N_b of a constraint_noise σ_b that is given; an estimate is of "
            "σ_b/√N_b, for the problem's batch_size. Give both, or neither."
        )
    wanted = _estimated_constants(partial, stochastic, weakly)
    missing = {name: source for name, source in wanted.items() if name not in given}
    estimated: list[str] = []
    if missing:
        radius = None if np.isfinite(farthest) else given["distance"]
        found = [estimate(part, points=points, seed=seed, radius=radius) for part in parts]
        for name, source in missing.items():
            given[name] = max(getattr(each, source) for each in found)
            # This wording is part of checkpoints' fingerprints, as those in `fedsgm` are.
            estimated.append(
                f"{name} = {given[name]:.6g} is an estimate: the extreme of what was seen at "
                f"{points} points of X."
            )
    guarantee = fedsgm(
        rounds=rounds, clients=problem.n, participants=participants, size=problem.size, **given
    )
    if isinstance(problem.domain, WholeSpace):
        known_facts.append(NO_PROJECTION)
    unknown = [sentence for sentence in guarantee.unchecked if sentence not in known_facts]
    return dataclasses.replace(guarantee, unchecked=tuple(unknown + estimated))


def _estimated_constants(partial: bool, stochastic: bool, weakly: bool) -> dict[str, str]:
    """Return the constants that the theorem needs, and the fields of `Estimates` to take."""
    wanted = {"lipschitz": "lipschitz"}
    if partial:
        wanted["sigma"] = "sigma"
    if stochastic:
        wanted |= {"gradient_noise": "gradient_noise", "constraint_noise": "constraint_noise"}
    if weakly:
        wanted["feasible_value"] = "lowest_constraint"
    return wanted
