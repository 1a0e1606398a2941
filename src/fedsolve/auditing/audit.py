"""Verdicts on a model's constraints: met, not met, or too few samples to tell.

Every claim is judged over all clients together, and at each client. Its value is known up to
one-sided confidence bounds, each of which may fail with probability δ/M, where M counts the claims
that are judged (the parts of a gap or a tail share theirs). A claim is met if the bound on the
wrong side of its value is on the right side of the claim's, and not met in the opposite case. A
wrong verdict needs a bound that fails, and for each claim only one of the two can give a wrong one.
So all verdicts are right together with probability 1 − δ at least, if the samples are independent
and neither training nor choices between models used them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsolve.auditing.bounds import (
    clopper_pearson_lower,
    clopper_pearson_upper,
    empirical_bernstein,
)
from fedsolve.auditing.counting import Claimed, Ranges, Sum, Tally, count, range_of
from fedsolve.errors import InvalidInput
from fedsolve.storage.atomic import write_atomically
from fedsolve.types import PyTree, Table

if TYPE_CHECKING:  # a slow import, and a package above this one
    from pandas import DataFrame

    from fedsolve.solving.result import Run

EVERYWHERE = "all"  # the site of a claim about all clients together
MOST = 1e9  # samples beyond which no verdict is promised
MET, NOT_MET, UNKNOWN, UNBOUNDED = "met", "not met", "cannot be told", "no bound"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What held-out data say about one claim at one place.

    Args:
        name: What the claim is about.
        site: The client, or `"all"`.
        kind: `"at_most"`, `"at_least"`, `"gap"` or `"tail"`; `"mean"` for the mean over clients of
            the clients' means.
        bound: What the value must not exceed (or not be below, for `"at_least"`).
        value: The value on the held-out samples; NaN if there are none.
        lower: A lower confidence bound on the true value.
        upper: An upper confidence bound on it.
        samples: The number of samples.
        verdict: `"met"`, `"not met"`, `"cannot be told"` (with so few samples) or `"no bound"`
            (where `why` says what is not known).
        needed: How many samples with the same rates would suffice for a verdict; None if a verdict
            is there, or no number would do.
        why: Why there is no bound; empty if there is one.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.auditing.Verdict(
        ...     "sensitivity", "all", "at_least", 0.9, 0.95, 0.91, 0.98, 200, "met", None
        ... )
        >>> found.verdict
        'met'
    """

    name: str
    site: str
    kind: str
    bound: float
    value: float
    lower: float
    upper: float
    samples: int
    verdict: str
    needed: int | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Audit:
    """The verdicts of an audit.

    Args:
        confidence: The probability with which all verdicts are right together.
        verdicts: One for each claim and place.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> problem = fs.Problem(
        ...     lambda w, data: ((data["x"] - w) ** 2).mean(),
        ...     {"x": np.ones((2, 3))},
        ...     params=np.zeros(1),
        ...     constraint=lambda w, data: (data["x"] - 1.5).mean(),
        ... )
        >>> run = fs.solve(problem, fs.FedSGM(0.1), rounds=1)
        >>> found = run.audit({"x": np.ones((2, 200))}, ranges=(-2.0, 2.0))
        >>> found["g"].verdict, found.met
        ('met', True)
    """

    confidence: float
    verdicts: tuple[Verdict, ...]

    def __getitem__(self, name: str | tuple[str, str]) -> Verdict:
        wanted = name if isinstance(name, tuple) else (name, EVERYWHERE)
        for each in self.verdicts:
            if (each.name, each.site) == wanted:
                return each
        raise KeyError(name)

    @property
    def met(self) -> bool:
        """Whether every claim is met."""
        return all(each.verdict == MET for each in self.verdicts)

    @property
    def table(self) -> DataFrame:
        """A pandas table with one row for each verdict."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(each) for each in self.verdicts])

    def to_json(self) -> Table:
        """Return the audit as JSON can hold it; what is not finite is None."""
        rows = [
            {
                name: None if isinstance(x, float) and not math.isfinite(x) else x
                for name, x in dataclasses.asdict(each).items()
            }
            for each in self.verdicts
        ]
        return {"confidence": self.confidence, "met": self.met, "verdicts": rows}

    @classmethod
    def from_json(cls, found: Any) -> Audit:
        """Return the audit that `to_json` made.

        Args:
            found: What `to_json` returned.

        Raises:
            InvalidInput: If it is something else.
        """
        missing: Table = {"value": math.nan, "lower": -math.inf, "upper": math.inf}
        try:
            rows: list[Table] = [
                {k: missing[k] if v is None and k in missing else v for k, v in row.items()}
                for row in found["verdicts"]
            ]
            return cls(float(found["confidence"]), tuple(Verdict(**row) for row in rows))
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"This is no audit: {error!r}.") from None

    def save(self, path: str | Path) -> None:
        """Write the audit to a JSON file.

        Args:
            path: The file.
        """
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        write_atomically(Path(path), text.encode())

    def __str__(self) -> str:
        head = ["claim", "where", "held-out", "bounds", "must be", "samples", "verdict"]
        rows = [head, *(list(cells(each)) for each in self.verdicts)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)) for r in rows]
        sure = f"All verdicts are right together with probability {self.confidence:g} at least."
        return "\n".join([*(line.rstrip() for line in lines), sure])


def cells(each: Verdict) -> tuple[str, ...]:
    """Return the cells of a verdict's row in a table."""
    sign = "≥" if each.kind == "at_least" else "≤"
    said = each.verdict
    if each.verdict == UNKNOWN:
        said += f"; {each.needed} samples would do" if each.needed else ""
    if each.why:
        said += f" ({each.why})"
    between = "" if each.why else f"{each.lower:.4g} … {each.upper:.4g}"
    value = "" if math.isnan(each.value) else f"{each.value:.4g}"
    return each.name, each.site, value, between, f"{sign} {each.bound:g}", f"{each.samples}", said


def audit(
    run: Run,
    test_clients: object,
    confidence: float | int = 0.95,
    ranges: Ranges = None,
    tolerance: float | int | None = None,
    params: PyTree = None,
    names: Sequence[str] | None = None,
    sites: bool = True,
) -> Audit:
    """Judge a run's constraints on held-out data; see `Run.audit`.

    Args:
        run: The run.
        test_clients: The clients' held-out data.
        confidence: The probability with which all verdicts are right together.
        ranges: The range of the values of a mean.
        tolerance: The bound of a plain g; by default the algorithm's.
        params: The parameters to judge; by default the run's last ones.
        names: The clients' names.
        sites: Whether to judge every client as well.

    Returns:
        The verdicts.

    Raises:
        InvalidInput: If there is nothing to judge, or an argument cannot be used.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.neyman_pearson(clients=2)
        >>> run = fs.solve(problem, fs.FedSGM(0.1, tolerance=0.05), rounds=2)
        >>> found = fs.auditing.audit(run, problem.samples, ranges=(0.0, 50.0), sites=False)
        >>> [each.verdict for each in found.verdicts]
        ['cannot be told']
    """
    params = run.params if params is None else params
    tally = count(run.problem, params, test_clients, names, ranges)
    own = getattr(run.algorithm, "tolerance", 0.0) if tolerance is None else tolerance
    return judge(tally, confidence, ranges, float(own), sites)


def judge(
    tally: Tally,
    confidence: float | int = 0.95,
    ranges: Ranges = None,
    tolerance: float | int = 0.0,
    sites: bool = True,
) -> Audit:
    """Judge claims by counts and sums.

    Args:
        tally: The counts and sums of all clients.
        confidence: The probability with which all verdicts are right together.
        ranges: A range (low, high) in which all values of means lie for certain, or one for each
            claim by name. Without it, means have no bound.
        tolerance: The bound of a plain g.
        sites: Whether to judge every client as well.

    Returns:
        The verdicts.

    Raises:
        InvalidInput: If the confidence is not between 0 and 1, or a range is none.

    Example:
        >>> from fedsolve.auditing.counting import Claimed, Sum, Tally
        >>> import fedsolve as fs
        >>> claim = Claimed("sensitivity", "at_least", 0.9, ("0/all",), is_rate=True)
        >>> tally = Tally((claim,), ("a", "b"), ({"0/all": Sum(50, 49, 49)},) * 2)
        >>> [(each.site, each.verdict, each.needed) for each in fs.auditing.judge(tally).verdicts]
        [('all', 'met', None), ('a', 'cannot be told', 63), ('b', 'cannot be told', 63)]
    """
    if isinstance(confidence, bool) or not 0 < confidence < 1:
        raise InvalidInput(f"confidence must be between 0 and 1, got {confidence}.")
    jobs: list[tuple[Claimed, str, list[dict[str, Sum]]]] = []
    for claim in tally.claims:
        if not claim.each:
            jobs.append((claim, EVERYWHERE, list(tally.sums)))
        if sites or claim.each:
            alone = zip(tally.clients, tally.sums, strict=True)
            jobs += [(claim, name, [sums]) for name, sums in alone]
    known = [job for job in jobs if not _why_not(job[0], ranges)]
    failure = (1 - confidence) / max(len(known), 1)
    verdicts = [
        _judge(claim, site, parts, failure, float(tolerance), ranges) for claim, site, parts in jobs
    ]
    return Audit(float(confidence), tuple(verdicts))


def _why_not(claim: Claimed, ranges: Ranges) -> str:
    """Return why a claim cannot be bounded; empty if it can."""
    if claim.why:
        return claim.why
    known = range_of(claim, ranges) is not None
    return "" if known else "the range of its values is not known: give ranges=(low, high)"


def _judge(
    claim: Claimed,
    site: str,
    parts: list[dict[str, Sum]],
    failure: float,
    tolerance: float,
    ranges: Ranges,
) -> Verdict:
    """Judge one claim at one place, from the sums of its clients."""
    bound = claim.own_tolerance + tolerance if claim.bound is None else claim.bound
    within = range_of(claim, ranges)
    spans = [_span(claim, number, within) for number in range(len(claim.cells))]
    sums = [
        _combine(claim, [part[key] for part in parts], low)
        for key, (low, _) in zip(claim.cells, spans, strict=True)
    ]
    counts = [one.count for one in sums]
    samples = round(counts[0] if claim.kind == "tail" else sum(counts))
    values = [
        low + one.total / one.count if one.count else math.nan
        for one, (low, _) in zip(sums, spans, strict=True)
    ]
    value = _value(claim.kind, values) if values else math.nan
    why = _why_not(claim, ranges)
    common = (claim.name, site, claim.kind, bound, value)
    if why:
        return Verdict(*common, -math.inf, math.inf, samples, UNBOUNDED, None, why)
    stretched = [_stretch(claim, [part[k] for part in parts]) for k in claim.cells]

    def between(factor: float) -> tuple[float, float]:
        """Return the confidence bounds if there were `factor` times the samples."""
        each = [
            _bounds(claim, _times(one, factor), span, stretch, failure / _shares(claim))
            for one, span, stretch in zip(sums, spans, stretched, strict=True)
        ]
        return _interval(claim.kind, each)

    lower, upper = between(1.0)
    verdict = _verdict(claim.kind, bound, lower, upper)
    needed = None
    if verdict == UNKNOWN and all(one.count for one in sums):
        needed = _needed(lambda f: _verdict(claim.kind, bound, *between(f)), samples)
    return Verdict(*common, lower, upper, samples, verdict, needed)


def _combine(claim: Claimed, each: list[Sum], low: float) -> Sum:
    """Add up clients' sums of v − low; for a mean over clients' means, weighted by N/(n n_j)."""
    each = [
        Sum(n, total - n * low, squares - 2 * low * total + n * low**2)
        for n, total, squares in each
    ]
    if claim.kind == "mean" and len(each) > 1:
        each = [one for one in each if one.count]
        every = sum(one.count for one in each)
        weights = [every / (len(each) * one.count) for one in each]
    else:
        weights = [1.0] * len(each)
    return Sum(
        sum(one.count for one in each),
        sum(a * one.total for a, one in zip(weights, each, strict=True)),
        sum(a**2 * one.squares for a, one in zip(weights, each, strict=True)),
    )


def _stretch(claim: Claimed, each: list[Sum]) -> float:
    """Return the largest weight N/(n n_j) of a mean over clients' means, by which ranges grow."""
    there = [one.count for one in each if one.count]
    if claim.kind != "mean" or not there:
        return 1.0
    return max(sum(there) / (len(there) * count) for count in there)


def _times(one: Sum, factor: float) -> Sum:
    return Sum(one.count * factor, one.total * factor, one.squares * factor)


def _span(claim: Claimed, number: int, within: tuple[float, float] | None) -> tuple[float, float]:
    """Return the range of a cell's values; a tail's are t + (v − t)₊/(1 − α)."""
    if within is None:
        return 0.0, math.inf  # only its low end is used, for the value
    if claim.kind != "tail":
        return within
    t, tail = claim.levels[number]
    return t, t + max(within[1] - t, 0) / (1 - tail)


def _shares(claim: Claimed) -> int:
    """Return how many bounds in one direction a claim uses, which share its δ."""
    if claim.kind == "gap":
        return 2 * len(claim.cells)
    return len(claim.cells)


def _bounds(
    claim: Claimed, one: Sum, span: tuple[float, float], stretch: float, failure: float
) -> tuple[float, float]:
    """Return confidence bounds on a cell's mean; weighted values are up to stretch·width."""
    if claim.is_rate:
        return (
            clopper_pearson_lower(one.total, one.count, failure),
            clopper_pearson_upper(one.total, one.count, failure),
        )
    if one.count < 2:
        return span
    low, high = span
    mean = low + one.total / one.count
    away = empirical_bernstein(one.count, one.total, one.squares, stretch * (high - low), failure)
    return max(mean - away, low), min(mean + away, high)


def _value(kind: str, values: list[float]) -> float:
    if kind == "gap":
        there = [value for value in values if not math.isnan(value)]
        return max(there) - min(there) if len(there) > 1 else math.nan
    return min(values) if kind == "tail" else values[0]


def _interval(kind: str, each: list[tuple[float, float]]) -> tuple[float, float]:
    """Return bounds on the claim's value from those on its cells' means."""
    lowers, uppers = zip(*each, strict=True)
    if kind == "gap":
        return max(max(lowers) - min(uppers), 0.0), max(uppers) - min(lowers)
    if kind == "tail":
        return min(lowers), min(uppers)
    return lowers[0], uppers[0]


def _verdict(kind: str, bound: float, lower: float, upper: float) -> str:
    if kind == "at_least":
        return MET if lower >= bound else NOT_MET if upper < bound else UNKNOWN
    return MET if upper <= bound else NOT_MET if lower > bound else UNKNOWN


def _needed(verdict: Callable[[float], str], samples: int) -> int | None:
    """Return how many samples with the same rates give a verdict; None if no number does."""
    high = 2.0
    while verdict(high) == UNKNOWN:
        high *= 2
        if high * samples > MOST:
            return None
    low = high / 2
    while (high - low) * samples > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if verdict(middle) == UNKNOWN else (low, middle)
    return math.ceil(round(high * samples, 2))
