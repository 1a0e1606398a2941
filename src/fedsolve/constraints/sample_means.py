"""Bounds on means over samples: rates, gaps between rates, losses of groups, tails.

A cell is a part of all samples (those with label 1 of one group, say). For every cell the mean of a
value is taken over all clients' samples together: of a decision 1{score > threshold}, or of a loss.

    at most    g = max over cells (mean − bound)
    at least   g = max over cells (bound − mean)
    gap        g = max over labels (largest − smallest mean of the groups) − bound
    tail       g = max over groups (min over t of the mean of t + (loss − t)₊ / (1 − α)) − bound

Clients send two numbers for each cell, their count and the total of their values. They descend a
smooth surrogate of g, along its slope at the totals over all clients: if S is the sum of the
clients' sums s_j, then ∇g = Σ_j G'(S) ∇s_j, so a client needs G'(S) only. Hence a client without
samples of a group adds nothing, and with full participation and one local step the server follows
the gradient of the global constraint.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from fedsolve.constraints.surrogates import Surrogate
from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.problem.constraints import Constraint, Exact, Scale, Weights, jackknife
from fedsolve.problem.padding import is_random
from fedsolve.problem.samples import Samples
from fedsolve.types import PyTree

ALL = "all"  # the key of the only cell of a constraint without groups
Number = Float[Array, ""] | Float[np.ndarray, ""] | float | np.number


class Sums(NamedTuple):
    """Sums over the samples of one cell, which can be added over clients and sites.

    Args:
        count: The number of samples, n.
        total: Σ v over them; for a rate, the number of positive decisions.
        squares: Σ v², for bounds that use the variance.

    Example:
        >>> import fedsolve as fs
        >>> sums = fs.constraints.Sums(count=20.0, total=5.0, squares=5.0)
        >>> sums.total / sums.count
        0.25
    """

    count: PyTree
    total: PyTree
    squares: PyTree


@dataclasses.dataclass(frozen=True)
class Cell:
    """A part of the samples: those with a label, of a group; None for any.

    Args:
        key: Its name among the counts.
        label: The label.
        group: The code of the group.
        level: t, where the value is t + (loss − t)₊ / (1 − α).

    Example:
        >>> import fedsolve as fs
        >>> fs.constraints.Cell("women", label=1, group=1).key
        'women'
    """

    key: str
    label: int | None = None
    group: int | None = None
    level: float | None = None


@dataclasses.dataclass(frozen=True)
class Claim:
    """One thing that a constraint claims: a bound on something made of the means of cells.

    Args:
        name: What it is, such as `"sensitivity"` or `"sensitivity.women"`.
        kind: `"at_most"` or `"at_least"` (of one cell's mean), `"gap"` (the largest less the
            smallest mean of the cells is at most the bound), `"tail"` (the smallest mean of the
            cells is at most the bound).
        bound: The bound.
        cells: The keys of its cells.

    Example:
        >>> import fedsolve as fs
        >>> fs.constraints.Claim("sensitivity", "at_least", 0.9, ("all",)).bound
        0.9
    """

    name: str
    kind: str
    bound: float
    cells: tuple[str, ...]


class SampleMeans(Constraint):
    """A constraint on means over the samples of all clients; made by the functions of this module.

    Exact values are for reports, audits and decisions; smooth surrogates are for gradients. For an
    audit, add up `counts` over clients and look at each of `claims`:

    1. `constraint.counts(params, data, mask)` returns `Sums` by cell, of one client's data.
    2. Add them over clients: `jax.tree.map(operator.add, one, other)`.
    3. `constraint.rates(sums)` has each cell's mean, `constraint.claimed(sums)` the rate, gap or
       tail of each claim, and `constraint.exact(sums)` the largest violation g.

    If `is_rate`, a cell's total is a number of successes among `count` (for Clopper-Pearson);
    otherwise its values have the variance that `squares` gives.

    Args:
        name: The name in the history.
        values: Function of (params, data) that returns a number for each sample: a score or a loss.
        kind: `"at_most"`, `"at_least"`, `"gap"` or `"tail"`.
        bound: The bound on the means.
        is_rate: Whether a score above `threshold` counts 1 and another one 0, else values count.
        label: The entry of the data with labels 0 and 1; None if none is used.
        labels: The labels over which means are taken; (None,) for all samples.
        group: The entry of the data with groups; None for none.
        groups: Names and codes of the groups; None for those that are in the data.
        threshold: The score above which a decision is positive.
        surrogate: φ, the smooth surrogate of a decision.
        judged_by: `"rate"` if g is that of the exact rates, `"surrogate"` if of the surrogates.
        tail: α of a tail.
        levels: The levels t of a tail.
        adapted: Functions of (params, samples) for exact and smooth sums; a `Problem` makes them.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> bound = fs.constraints.sensitivity(lambda w, data: data["x"] @ w, at_least=0.95)
        >>> data = {"x": jnp.eye(3), "y": jnp.array([1, 1, 0])}
        >>> sums = bound.counts(jnp.array([1.0, -1.0, 1.0]), data)
        >>> int(sums["all"].total), int(sums["all"].count)
        (1, 2)
        >>> round(float(bound.exact(sums)), 2), [claim.name for claim in bound.claims]
        (0.45, ['sensitivity'])
    """

    name: str = eqx.field(static=True)
    values: Any = eqx.field(static=True)
    kind: str = eqx.field(static=True)
    bound: float = eqx.field(static=True)
    is_rate: bool = eqx.field(static=True, default=True)
    label: str | None = eqx.field(static=True, default=None)
    labels: tuple[int | None, ...] = eqx.field(static=True, default=(None,))
    group: str | None = eqx.field(static=True, default=None)
    groups: tuple[tuple[str, int], ...] | None = eqx.field(static=True, default=None)
    threshold: float = eqx.field(static=True, default=0.0)
    surrogate: Surrogate | None = eqx.field(static=True, default=None)
    judged_by: str = eqx.field(static=True, default="rate")
    tail: float = eqx.field(static=True, default=0.0)
    levels: tuple[float, ...] = eqx.field(static=True, default=())
    adapted: tuple[Any, Any] | None = eqx.field(static=True, default=None)

    # What is claimed

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The parts of the samples over which means are taken."""
        found = []
        for label, (group, code) in self._parts:
            words = [] if len(self.labels) == 1 else [f"{self.label}={label}"]
            words += [] if group is None else [group]
            key = ", ".join(words) or ALL
            if self.kind == "tail":
                found += [Cell(f"{key}, t={t:g}", label, code, t) for t in self.levels]
            else:
                found.append(Cell(key, label, code))
        return tuple(found)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What the constraint claims, each with its cells."""
        cells = self.cells
        if self.kind == "gap":
            each = len(cells) // len(self.labels)
            by_label = [cells[i : i + each] for i in range(0, len(cells), each)]
            several = len(self.labels) > 1
            return tuple(
                Claim(
                    f"{self.name}.{self.label}={label}" if several else self.name,
                    "gap",
                    self.bound,
                    tuple(cell.key for cell in part),
                )
                for label, part in zip(self.labels, by_label, strict=True)
            )
        size = len(self.levels) if self.kind == "tail" else 1
        parts = [cells[i : i + size] for i in range(0, len(cells), size)]
        names = [part[0].key.partition(", t=")[0] for part in parts]
        return tuple(
            Claim(
                self.name if name == ALL else f"{self.name}.{name}",
                self.kind,
                self.bound,
                tuple(cell.key for cell in part),
            )
            for name, part in zip(names, parts, strict=True)
        )

    @property
    def _parts(self) -> list[tuple[int | None, tuple[str | None, int | None]]]:
        if self.group is not None and self.groups is None:
            raise InvalidInput(
                f"The groups of {self.name} are those in the clients' data: make a Problem with "
                "it first, or name them with `groups`."
            )
        groups: tuple[tuple[str | None, int | None], ...] = self.groups or ((None, None),)
        return [(label, group) for label in self.labels for group in groups]

    # Exact values

    def counts(
        self, params: PyTree, data: PyTree, mask: Bool[Array, " s"] | None = None
    ) -> dict[str, Sums]:
        """Count, over one client's samples, what exact means need.

        Args:
            params: Where to evaluate, in the problem's own structure.
            data: One client's data, with samples on the first axis of its arrays.
            mask: Which samples are real; by default `data["mask"]` if there is one, else all.

        Returns:
            Sums by the key of their cell. Add them over clients.
        """
        given = data if mask is None else {**data, "mask": mask}
        extra = (None,) if is_random(self.values) else ()
        return Tally(self, squares=True)(params, given, *extra)

    def rates(self, sums: Mapping[str, PyTree]) -> dict[str, Number]:
        """Compute the mean of every cell; NaN for a cell without samples.

        Args:
            sums: What `counts` returned, added over clients.

        Returns:
            Means by the key of their cell.
        """
        return {key: _mean(one[0], one[1], jnp.nan) for key, one in sums.items()}

    def claimed(self, sums: Mapping[str, PyTree]) -> dict[str, Number]:
        """Compute the rate, gap or tail that each claim is about; NaN where it is not known.

        Args:
            sums: What `counts` returned, added over clients.

        Returns:
            Values by the name of their claim.
        """
        return {claim.name: self._value(claim, sums) for claim in self.claims}

    def exact(self, sums: Mapping[str, PyTree]) -> Number:
        """Compute g, the largest violation of a claim.

        Claims about cells without samples do not count; where none is left, g is 0.

        Args:
            sums: What `counts` returned, added over clients.

        Returns:
            g: at most 0 if all claims hold.
        """
        found = []
        for claim in self.claims:
            value = self._value(claim, sums)
            found.append(claim.bound - value if claim.kind == "at_least" else value - claim.bound)
        values = jnp.stack([jnp.asarray(value) for value in found])
        known = ~jnp.isnan(values)
        largest = jnp.max(jnp.where(known, values, -jnp.inf))
        return jnp.where(jnp.any(known), largest, 0)

    def _value(self, claim: Claim, sums: Mapping[str, PyTree]) -> Number:
        rates = jnp.stack([_mean(sums[key][0], sums[key][1], jnp.nan) for key in claim.cells])
        if claim.kind == "gap":
            known = jnp.sum(~jnp.isnan(rates)) > 1
            return jnp.where(known, jnp.nanmax(rates) - jnp.nanmin(rates), jnp.nan)
        return jnp.min(rates) if claim.kind == "tail" else rates[0]

    # On a client

    def measure(self, params: PyTree, samples: Samples, scale: Scale) -> PyTree:
        """Compute the client's count and total of each cell, scaled up from a minibatch."""
        if scale is None:
            raise InvalidInput(f"{self.name} needs samples and labels of one length.")
        found = {"rate": self._tally(0)(params, samples)}
        if self.judged_by == "surrogate":
            found["surrogate"] = self._tally(1)(params, samples)
        return jax.tree.map(lambda total: total * scale, found)

    def local(self, params: PyTree, samples: Samples, focus: PyTree) -> Float[Array, ""]:
        """Compute the client's part of the surrogate of g."""
        return self.descended(params, samples, focus, 1)

    def descended(
        self, params: PyTree, samples: Samples, focus: PyTree, scale: Scale
    ) -> Float[Array, ""]:
        """Compute the client's part of the surrogate of g: Σ slope · total over the cells."""
        if focus is None:
            raise InvalidInput(f"A client alone does not know which part of {self.name} to reduce.")
        totals = self._tally(1)(params, samples)
        parts = [focus[key] * total for key, (_, total) in totals.items()]
        return jnp.sum(jnp.stack(parts)) * (1 if scale is None else scale)

    def _tally(self, which: int) -> PyTree:
        """Return the function of (params, samples) for exact sums (0) or for surrogates (1)."""
        if self.adapted is None:
            raise InvalidInput(f"Give {self.name} to a Problem before clients measure it.")
        return self.adapted[which]

    # On the server

    def combine(
        self, replies: Replies, weights: Weights = None
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """Compute g from the totals over clients, and its slope at these totals."""
        found = replies.sum()
        judged = found["rate" if self.judged_by == "rate" else "surrogate"]

        def value(totals: dict[str, Array]) -> Float[Array, ""]:
            return jnp.asarray(
                self.exact({k: (judged[k][0], total) for k, total in totals.items()})
            )

        g, slope = jax.value_and_grad(value)({key: total for key, (_, total) in judged.items()})
        # Clients' answers are averaged, and their parts of g are to be added.
        return g, jax.tree.map(lambda each: jnp.nan_to_num(each) * replies.count, slope)

    def deviation(self, replies: Replies, clients: int) -> Float[Array, ""]:
        """Estimate the standard deviation of g over cohorts by the jackknife."""
        judged = replies.pick("rate" if self.judged_by == "rate" else "surrogate")
        return jackknife(lambda sums: jnp.asarray(self.exact(sums)), judged, clients)

    def renamed(self, name: str) -> SampleMeans:
        """Return the constraint with another name."""
        return dataclasses.replace(self, name=name)

    def report(self, replies: Replies) -> dict[str, Array]:
        """Compute the exact rate, gap or tail of each claim, and the means of a gap's cells."""
        sums = replies.sum()["rate"]
        found = {name: jnp.asarray(value) for name, value in self.claimed(sums).items()}
        if self.kind == "gap":
            rates = self.rates(sums).items()
            found |= {f"{self.name}.{key}": jnp.asarray(rate) for key, rate in rates}
        return found

    # For a problem

    def fitted(self, samples: Samples) -> SampleMeans:
        """Return the constraint with the groups that are in the data; raise if it does not fit."""
        values, mask = samples.values, samples.mask
        if not isinstance(values, dict) or isinstance(mask, dict):
            raise InvalidInput(
                f"{self.name} needs clients' data as a dict of arrays with one row for each sample."
            )
        for what, column in (("label", self.label), ("group", self.group)):
            if column is not None and column not in values:
                there = ", ".join(map(str, values))
                raise InvalidInput(
                    f"{self.name}: there is no {what} {column!r} in the clients' data; there are "
                    f"{there}."
                )
        if self.label is not None:
            _check_codes(self.name, "label", self.label, values, mask, (0, 1))
        if self.group is None:
            return self
        if self.groups is None:
            found = np.unique(_real(values[self.group], mask))
            codes = tuple((f"{self.group}={code:g}", int(code)) for code in found.tolist())
            return dataclasses.replace(self, groups=codes)
        known = tuple(code for _, code in self.groups)
        _check_codes(self.name, "group", self.group, values, mask, known)
        return self

    def check_each(self, samples: Samples) -> None:
        """Raise if some client has no samples in some cell, so that its own mean is not known."""
        if self.label is None and self.group is None:
            return
        mask = samples.mask
        for cell in self.cells:
            inside = None
            for column, code in ((self.label, cell.label), (self.group, cell.group)):
                if column is None or code is None:
                    continue
                here = np.asarray(samples.values[column]) == code
                inside = here if inside is None else inside & here
            if inside is None:
                continue
            inside = inside if mask is None else inside & np.asarray(mask)
            empty = np.flatnonzero(~inside.reshape(len(inside), -1).any(axis=1))
            if len(empty):
                raise InvalidInput(
                    f"Client {empty[0]} has no samples for {self.name} of {_words(self, cell)}, so "
                    "its own is not known; bound it over all clients, or leave the client out."
                )

    def adapt(self, exact: Exact) -> SampleMeans:
        """Return the constraint with its sums made exact on padded samples."""
        return dataclasses.replace(
            self,
            adapted=(
                exact(Tally(self), sums=True),
                exact(Tally(self, soft=True), sums=True),
            ),
        )


@dataclasses.dataclass(frozen=True)
class Tally:
    """Function of (params, data): count and total of each cell, over the samples of the mask.

    It takes a key and a state after the data where the function of the values does.
    """

    constraint: SampleMeans
    soft: bool = False
    squares: bool = False

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.constraint.values)

    def __call__(self, params: PyTree, data: PyTree, *extra: PyTree) -> dict[str, PyTree]:
        of = self.constraint
        values = jnp.asarray(of.values(params, data, *extra))
        rows = jax.tree.leaves({k: v for k, v in data.items() if k != "mask"})[0].shape[0]
        if values.shape != (rows,):
            what = "score" if of.is_rate else "loss"
            raise InvalidInput(
                f"The {what} of {of.name} must return one number for each of {rows} samples, got "
                f"shape {values.shape}."
            )
        mask = data["mask"] if "mask" in data else jnp.ones(rows, bool)
        found: dict[str, PyTree] = {}
        for cell in of.cells:
            inside = jnp.asarray(mask, bool)
            if of.label is not None and cell.label is not None:
                inside = inside & (jnp.asarray(data[of.label]) == cell.label)
            if of.group is not None and cell.group is not None:
                inside = inside & (jnp.asarray(data[of.group]) == cell.group)
            own = self._values(values, cell)
            count = jnp.sum(inside, dtype=own.dtype)
            total = jnp.sum(own, where=inside)
            found[cell.key] = count, total
            if self.squares:
                found[cell.key] = Sums(count, total, jnp.sum(own**2, where=inside))
        return found

    def _values(self, values: Float[Array, " s"], cell: Cell) -> Float[Array, " s"]:
        """Return what is averaged over a cell."""
        of = self.constraint
        if cell.level is not None:
            return cell.level + jnp.maximum(values - cell.level, 0) / (1 - of.tail)
        if not of.is_rate:
            return values
        z = values - of.threshold
        if not self.soft:
            return (z > 0).astype(values.dtype)
        assert of.surrogate is not None
        # A rate that must be large is bounded from below: 1{z > 0} = 1 − 1{−z ≥ 0}.
        return 1 - of.surrogate(-z) if of.kind == "at_least" else of.surrogate(z)


def _mean(count: PyTree, total: PyTree, empty: float) -> PyTree:
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), empty)


def _words(of: SampleMeans, cell: Cell) -> str:
    """Describe a cell in a sentence."""
    words = [] if cell.label is None else [f"{of.label} = {cell.label}"]
    names = [name for name, code in of.groups or () if code == cell.group]
    return " and ".join(words + [f"group {name}" for name in names]) or "all samples"


def _real(values: object, mask: object) -> np.ndarray:
    """Return the values of real samples."""
    values = np.asarray(values)
    return values.ravel() if mask is None else values[np.asarray(mask)]


def _check_codes(
    name: str, what: str, column: str, values: Any, mask: object, known: tuple[int, ...]
) -> None:
    """Raise if a column of labels or groups has a value that is not among the known ones."""
    codes = np.asarray(values[column])
    if codes.ndim != 2:
        raise InvalidInput(f"{name}: the {what} {column!r} must have one number for each sample.")
    bad = ~np.isin(codes, known)
    bad = bad if mask is None else bad & np.asarray(mask)
    if bad.any():
        client, row = (int(each[0]) for each in np.nonzero(bad))
        raise InvalidInput(
            f"{name}: client {client} has the {what} {codes[client, row]:g} in {column!r}, which "
            f"is none of {', '.join(map(str, known))}."
        )
