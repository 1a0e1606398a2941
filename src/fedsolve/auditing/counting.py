"""Counts and sums over held-out samples: all that an audit needs of a client's data.

A constraint with `claims` and `counts` (those of `fs.constraints`) counts by itself. A plain
function g_j is counted if it is a mean over samples: its values at single samples are summed, after
a check that their mean is g_j. Nothing else of the data leaves the place where it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.constraints.sample_means import Claim, SampleMeans
from fedsolve.errors import InvalidInput
from fedsolve.problem.constraints import Constraint, Maximum, Mean
from fedsolve.problem.each_client import EachClient
from fedsolve.problem.padding import is_random
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples, full_mask
from fedsolve.problem.several import Several
from fedsolve.problem.stacking import as_samples
from fedsolve.types import Function, PyTree, Table

ALL = "all"  # the only cell of a plain function
Range = tuple[float | int, float | int]
Ranges = Mapping[str, Range] | Range | None


class Sum(NamedTuple):
    """Sums over the samples of a cell: their number, Σ v and Σ v²."""

    count: float  # pyright: ignore[reportIncompatibleMethodOverride] (a tuple has one)
    total: float
    squares: float


@dataclasses.dataclass(frozen=True)
class Claimed:
    """What a constraint claims.

    Args:
        name: What it is about.
        kind: `"at_most"`, `"at_least"`, `"gap"`, `"tail"`, or `"mean"`, the mean over clients of
            their means is at most the bound.
        bound: The bound; None for a plain g ≤ ε, where it is `own_tolerance` and the audit's.
        cells: The keys of its cells among the sums.
        is_rate: Whether the values are 0 or 1.
        each: Whether it is about every client alone, and not about all together.
        own_tolerance: ε_i of a plain g that is one of several constraints.
        levels: For a tail, (t, α) of each cell, whose values are t + (v − t)₊/(1 − α).
        why: Why it cannot be bounded; empty if it can.
    """

    name: str
    kind: str
    bound: float | None
    cells: tuple[str, ...]
    is_rate: bool
    each: bool = False
    own_tolerance: float = 0.0
    levels: tuple[tuple[float, float], ...] = ()
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Tally:
    """The counts and sums of some clients, which may travel: no sample can be read from them.

    Args:
        claims: What the constraints claim.
        clients: The clients' names.
        sums: For each client, its sums by the key of their cell.
        model: A digest of the parameters, so that counts of two models are not added.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> problem = fs.Problem(
        ...     lambda w, data: ((data["x"] - w) ** 2).mean(),
        ...     {"x": np.ones((2, 3))},
        ...     params=np.zeros(1),
        ...     constraint=lambda w, data: (data["x"] - 1.5).mean(),
        ... )
        >>> tally = fs.auditing.count(problem, problem.params, {"x": np.ones((2, 4))})
        >>> [int(sums["0/all"].count) for sums in tally.sums]
        [4, 4]
    """

    claims: tuple[Claimed, ...]
    clients: tuple[str, ...]
    sums: tuple[dict[str, Sum], ...]
    model: str = ""

    def plus(self, other: Tally) -> Tally:
        """Return both tallies as one.

        Args:
            other: The tally of other clients.

        Raises:
            InvalidInput: If it is of another model or of other constraints, or of a client that
                is here already.
        """
        if self.model != other.model:
            raise InvalidInput("These counts are of different models.")
        if self.claims != other.claims:
            raise InvalidInput("These counts are of other constraints, or of another problem.")
        if both := set(self.clients) & set(other.clients):
            raise InvalidInput(f"There are two counts of {sorted(both)[0]}.")
        clients, sums = self.clients + other.clients, self.sums + other.sums
        return Tally(self.claims, clients, sums, self.model)

    def to_json(self) -> Table:
        """Return the tally as JSON can hold it."""
        return {
            "model": self.model,
            "claims": [dataclasses.asdict(claim) for claim in self.claims],
            "clients": {
                name: {key: [float(x) for x in one] for key, one in sums.items()}
                for name, sums in zip(self.clients, self.sums, strict=True)
            },
        }

    @classmethod
    def from_json(cls, found: Any) -> Tally:
        """Return the tally that `to_json` made.

        Args:
            found: What `to_json` returned.

        Raises:
            InvalidInput: If it is something else.
        """
        try:
            claims = tuple(_claimed(claim) for claim in found["claims"])
            sums = tuple({k: Sum(*v) for k, v in one.items()} for one in found["clients"].values())
            return cls(claims, tuple(found["clients"]), sums, str(found["model"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"These are no counts of an audit: {error!r}.") from None


def _claimed(found: Table) -> Claimed:
    lists = {"cells": tuple(found["cells"]), "levels": tuple(map(tuple, found["levels"]))}
    return Claimed(**found | lists)


def range_of(claim: Claimed, ranges: Ranges) -> tuple[float, float] | None:
    """Return the range of a claim's values; None if it is not known."""
    if claim.is_rate:
        return 0.0, 1.0
    found = ranges.get(claim.name) if isinstance(ranges, Mapping) else ranges
    if found is None:
        return None
    try:
        low, high = (float(x) for x in found)
    except (TypeError, ValueError):
        raise InvalidInput(f"A range is (low, high), got {found!r}.") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InvalidInput(f"A range is (low, high) with low < high, got {found}.")
    return low, high


def count(
    problem: Problem,
    params: PyTree,
    test_clients: object,
    names: Sequence[str] | None = None,
    ranges: Ranges = None,
) -> Tally:
    """Count, over held-out samples, what an audit of the problem's constraints needs.

    Args:
        problem: The problem.
        params: The parameters, in the problem's own structure.
        test_clients: The clients' held-out data, in a form that `Problem` takes.
        names: The clients' names; by default `client 0`, `client 1`, …
        ranges: The ranges of means (see `judge`), which are checked here, where the values are.

    Returns:
        Counts and sums for each client.

    Raises:
        InvalidInput: If the problem has no constraint or keeps parts of the model on the clients,
            if the data are empty or do not fit, or if a value is outside its range.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> problem = fs.Problem(
        ...     lambda w, data: ((data["x"] - w) ** 2).mean(),
        ...     {"x": np.ones((2, 3))},
        ...     params=np.zeros(1),
        ...     constraint=lambda w, data: (data["x"] - 1.5).mean(),
        ... )
        >>> fs.auditing.count(problem, problem.params, {"x": np.ones((1, 4))}).clients
        ('client 0',)
    """
    if problem.constraint is None:
        raise InvalidInput("There is nothing to audit: the problem has no constraint.")
    if problem.keeps_own or problem.state is not None:
        raise InvalidInput("Models with personal parameters or a state cannot be audited.")
    if test_clients is None:
        raise InvalidInput("An audit needs held-out data of the clients.")
    samples = as_samples(test_clients).gathered()
    leaves = jax.tree.leaves(samples.values)
    if not leaves or any(np.ndim(leaf) < 1 or not len(leaf) for leaf in leaves):
        raise InvalidInput("An audit needs held-out data of the clients; these are empty.")
    clients = len(leaves[0])
    if names is None:
        names = [f"client {number}" for number in range(clients)]
    if len(names) != clients or len(set(names)) != clients:
        raise InvalidInput(f"names must be {clients} different names, one for each client.")
    digest, params = _digest(params), jax.tree.map(_on_device, params)
    claims: list[Claimed] = []
    sums: list[dict[str, Sum]] = [{} for _ in range(clients)]
    for number, (part, name, tolerance) in enumerate(_parts(problem.constraint)):
        for claim, found in _count(part, name, str(number), params, samples, clients, ranges):
            claims.append(dataclasses.replace(claim, own_tolerance=tolerance))
            for own, more in zip(sums, found, strict=True):
                own |= more
    return Tally(tuple(claims), tuple(names), tuple(sums), digest)


def _on_device(leaf: PyTree) -> PyTree:
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf


def _digest(params: PyTree) -> str:
    """Return a digest of parameters."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in map(np.asarray, jax.tree.leaves(params)):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


Found = list[tuple[Claimed, list[dict[str, Sum]]]]


def _parts(constraint: Constraint) -> list[tuple[Constraint, str, float]]:
    """Return the constraints that a constraint is made of, with names and tolerances."""
    if isinstance(constraint, Several):
        return list(zip(constraint.parts, constraint.names, constraint.tolerances, strict=True))
    if isinstance(constraint, Maximum):
        parts = [each for part in constraint.parts for each, _, _ in _parts(part)]
        return [(part, f"g{i + 1}" if i else "g", 0.0) for i, part in enumerate(parts)]
    return [(constraint, "g", 0.0)]


def _count(
    constraint: Constraint,
    name: str,
    prefix: str,
    params: PyTree,
    samples: Samples,
    clients: int,
    ranges: Ranges,
) -> Found:
    """Count for one constraint; the keys of its cells begin with `prefix`."""
    if isinstance(constraint, EachClient):
        inner = constraint.constraint
        inner = inner.renamed(constraint.name) if constraint.name else inner
        return [
            (dataclasses.replace(claim, each=True, kind=_alone(claim.kind)), sums)
            for claim, sums in _count(inner, name, prefix, params, samples, clients, ranges)
        ]
    if isinstance(constraint, SampleMeans):
        return _count_named(constraint, prefix, params, samples, clients, ranges)
    if isinstance(constraint, Mean):
        return _count_mean(constraint, name, prefix, params, samples, clients, ranges)
    why = (
        f"{type(constraint).__name__} is no rate and no mean over samples: state it with "
        "fs.constraints"
    )
    return [(Claimed(name, "mean", None, (), False, why=why), [{} for _ in range(clients)])]


def _alone(kind: str) -> str:
    return "at_most" if kind == "mean" else kind


def _count_named(
    constraint: SampleMeans,
    prefix: str,
    params: PyTree,
    samples: Samples,
    clients: int,
    ranges: Ranges,
) -> Found:
    """Count by the constraint's own `counts`."""
    constraint = constraint.fitted(samples)  # raises where the data do not fit
    mask = None if samples.mask is None else jnp.asarray(full_mask(samples))
    values = jax.tree.map(jnp.asarray, samples.values)

    def one(data: PyTree, mask: PyTree) -> dict[str, PyTree]:
        return constraint.counts(params, data, mask)

    found = jax.vmap(one, in_axes=(0, None if mask is None else 0))(values, mask)
    arrays = {f"{prefix}/{key}": [np.asarray(x, float) for x in one] for key, one in found.items()}
    sums = [
        {key: Sum(*(x[client].item() for x in one)) for key, one in arrays.items()}
        for client in range(clients)
    ]
    claims = [
        Claimed(
            claim.name,
            claim.kind,
            float(claim.bound),
            tuple(f"{prefix}/{key}" for key in claim.cells),
            constraint.is_rate,
            levels=_levels(constraint, claim),
        )
        for claim in constraint.claims
    ]
    if not constraint.is_rate:
        extra = (None,) if is_random(constraint.values) else ()
        seen = jax.vmap(lambda data: constraint.values(params, data, *extra))(values)
        seen = np.asarray(seen if mask is None else seen[mask], float).ravel()
        for claim in claims:
            _check_range(claim, seen, ranges)
    return [(claim, sums) for claim in claims]


def _count_mean(
    constraint: Mean,
    name: str,
    prefix: str,
    params: PyTree,
    samples: Samples,
    clients: int,
    ranges: Ranges,
) -> Found:
    """Sum g_j's values at single samples, if g_j is their mean."""
    exact: Function = constraint.function
    why = "g_j is no mean over samples: state it with fs.constraints"
    claimed = Claimed(name, "mean", None, (f"{prefix}/{ALL}",), False)
    sums: list[dict[str, Sum]] = []
    for client in range(clients):
        own = Samples(*jax.tree.map(itemgetter(client), (samples.values, samples.mask)))
        whole = float(exact(params, jax.tree.map(jnp.asarray, own)))
        one = _single_values(exact, params, own, whole)
        if one is None:
            claim = Claimed(name, "mean", None, (), False, why=why)
            return [(claim, [{} for _ in range(clients)])]
        _check_range(claimed, one, ranges)
        sums.append({f"{prefix}/{ALL}": Sum(*map(float, (len(one), one.sum(), one @ one)))})
    return [(claimed, sums)]


def _levels(constraint: SampleMeans, claim: Claim) -> tuple[tuple[float, float], ...]:
    """Return (t, α) of each cell of a tail."""
    if claim.kind != "tail":
        return ()
    level = {cell.key: cell.level or 0.0 for cell in constraint.cells}
    return tuple((level[key], constraint.tail) for key in claim.cells)


def _check_range(claim: Claimed, values: Float[np.ndarray, " s"], ranges: Ranges) -> None:
    """Raise if a value is outside the range in which it was said to lie for certain."""
    within = range_of(claim, ranges)
    if within is None:
        return
    least, most, slack = values.min(), values.max(), 1e-6 * (within[1] - within[0])
    if not (within[0] - slack <= least and most <= within[1] + slack):
        raise InvalidInput(
            f"{claim.name} has values from {least:.6g} to {most:.6g}, outside its range from "
            f"{within[0]:g} to {within[1]:g}."
        )


def _single_values(
    exact: PyTree, params: PyTree, own: Samples, whole: float
) -> Float[np.ndarray, " s"] | None:
    """Return g_j's values at single samples, where their mean is g_j; None where there are none.

    Of several sets of samples, g_j must be a mean over one, and depend on no other.
    """
    sets: list[tuple[str | None, PyTree]] = [(None, own.mask)]
    if not own.is_one_set:
        if not isinstance(own.values, dict):
            return None
        masks = own.mask if isinstance(own.mask, dict) else {}
        sets = [(name, masks.get(name)) for name in own.values]
    for name, mask in sets:
        moving = own.values if name is None else own.values[name]
        rows = jax.tree.map(jnp.asarray, moving)
        fixed = {} if name is None else {k: jnp.asarray(v)[:1] for k, v in own.values.items()}

        def at(row: PyTree, name: str | None = name, fixed: PyTree = fixed) -> Float[Array, ""]:
            alone = jax.tree.map(lambda leaf: leaf[None], row)
            data = alone if name is None else {**fixed, name: alone}
            if exact.sees_mask:
                data = {**data, "mask": full_mask(Samples(data))}
            return exact.function(params, data, *((None,) if exact.is_random else ()))

        try:
            found = np.asarray(jax.vmap(at)(rows), float)
        except Exception:  # a user's function of a single sample may raise anything
            continue
        found = found if mask is None else found[np.asarray(mask)]
        close = abs(found.mean() - whole) <= 1e-4 * max(1.0, np.abs(found).max())
        if np.isfinite(found).all() and close and (name is None or np.ptp(found) > 0):
            return found
    return None
