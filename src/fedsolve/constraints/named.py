"""Constraints by name: rates, gaps between groups, losses of groups, tails of losses."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedsolve.constraints.sample_means import SampleMeans
from fedsolve.constraints.surrogates import as_surrogate
from fedsolve.errors import InvalidInput
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.each_client import EachClient
from fedsolve.types import Function, PyTree

Groups = Mapping[str, int] | Sequence[str] | None
JUDGES = ("rate", "surrogate")


def sensitivity(
    score: Function,
    at_least: float | int,
    label: str = "y",
    group: str | None = None,
    groups: Groups = None,
    threshold: float | int = 0.0,
    surrogate: object = "sigmoid",
    temperature: float | int = 1.0,
    judged_by: str = "rate",
    name: str = "sensitivity",
) -> SampleMeans:
    """Bound the sensitivity from below: the share of samples with label 1 that are found.

    Args:
        score: Function of (params, one client's data) that returns a number for each sample, such
            as a logit; a score above `threshold` is a positive decision.
        at_least: The least sensitivity.
        label: The entry of the data with the labels, 0 or 1.
        group: The entry of the data with a group for each sample, by a code: the bound is then for
            every group; None for one bound.
        groups: The groups' names, for the codes 0, 1, … or as a dict of codes; by default all codes
            that are in the data. A deployment needs the names.
        threshold: The score above which a decision is positive.
        surrogate: `"sigmoid"`, `"hinge"` (which bounds the rate) or a function of scores, which
            clients descend in place of the rate.
        temperature: How wide the surrogate is: it tends to the rate as this tends to 0.
        judged_by: `"rate"`: g, by which rounds are judged, is that of the exact rate; or
            `"surrogate"`.
        name: The name in the history, which has the exact rate.

    Returns:
        The constraint, for `Problem(constraint=...)`.

    Raises:
        InvalidInput: If the bound is not in [0, 1] or another argument cannot be used.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> data = {"x": rng.normal(size=(3, 40, 2)), "y": rng.integers(0, 2, (3, 40))}
        >>> problem = fs.Problem(
        ...     lambda w, data: (w @ w) / 2,
        ...     data,
        ...     params=np.ones(2),
        ...     constraint=fs.constraints.sensitivity(lambda w, data: data["x"] @ w, at_least=0.9),
        ... )
        >>> run = fs.solve(problem, fs.FedSGM(0.1), rounds=2)
        >>> run.history["sensitivity"].shape
        (2,)
    """
    rate = _Rate("at_least", _share("at_least", at_least), label, (1,))
    return rate.made(locals())


def specificity(
    score: Function,
    at_least: float | int,
    label: str = "y",
    group: str | None = None,
    groups: Groups = None,
    threshold: float | int = 0.0,
    surrogate: object = "sigmoid",
    temperature: float | int = 1.0,
    judged_by: str = "rate",
    name: str = "specificity",
) -> SampleMeans:
    """Bound the specificity from below: the share of samples with label 0 that are not found.

    Args:
        score: Function of (params, one client's data) that returns a number for each sample.
        at_least: The least specificity.
        label: The entry of the data with the labels, 0 or 1.
        group: The entry of the data with a group for each sample, by a code: the bound is then for
            every group; None for one bound.
        groups: The groups' names, for the codes 0, 1, … or as a dict of codes; by default all codes
            that are in the data. A deployment needs the names.
        threshold: The score above which a decision is positive.
        surrogate: What clients descend in place of the rate; see `sensitivity`.
        temperature: How wide the surrogate is.
        judged_by: Whether g is that of the `"rate"` or of the `"surrogate"`.
        name: The name in the history.

    Returns:
        The constraint, for `Problem(constraint=...)`.

    Raises:
        InvalidInput: If the bound is not in [0, 1] or another argument cannot be used.

    Example:
        >>> import fedsolve as fs
        >>> bound = fs.constraints.specificity(lambda w, data: data["x"] @ w, at_least=0.8)
        >>> bound.claims[0].kind, bound.claims[0].bound
        ('at_least', 0.8)
    """
    # Negatives that are found, with the score turned: 1{score ≤ threshold} = 1 − 1{score > …}.
    rate = _Rate("at_least", _share("at_least", at_least), label, (0,), turned=True)
    return rate.made(locals())


def false_positive_rate(
    score: Function,
    at_most: float | int,
    label: str = "y",
    group: str | None = None,
    groups: Groups = None,
    threshold: float | int = 0.0,
    surrogate: object = "sigmoid",
    temperature: float | int = 1.0,
    judged_by: str = "rate",
    name: str = "false_positive_rate",
) -> SampleMeans:
    """Bound the false positive rate: the share of samples with label 0 that are found.

    Args:
        score: Function of (params, one client's data) that returns a number for each sample.
        at_most: The largest rate.
        label: The entry of the data with the labels, 0 or 1.
        group: The entry of the data with a group for each sample, by a code: the bound is then for
            every group; None for one bound.
        groups: The groups' names, for the codes 0, 1, … or as a dict of codes; by default all codes
            that are in the data. A deployment needs the names.
        threshold: The score above which a decision is positive.
        surrogate: What clients descend in place of the rate; see `sensitivity`.
        temperature: How wide the surrogate is.
        judged_by: Whether g is that of the `"rate"` or of the `"surrogate"`.
        name: The name in the history.

    Returns:
        The constraint, for `Problem(constraint=...)`.

    Raises:
        InvalidInput: If the bound is not in [0, 1] or another argument cannot be used.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> bound = fs.constraints.false_positive_rate(lambda w, data: data["x"] * w, at_most=0.1)
        >>> data = {"x": jnp.array([1.0, -1.0, 2.0, -3.0]), "y": jnp.array([0, 0, 1, 0])}
        >>> round(float(bound.claimed(bound.counts(1.0, data))["false_positive_rate"]), 3)
        0.333
    """
    rate = _Rate("at_most", _share("at_most", at_most), label, (0,))
    return rate.made(locals())


def demographic_parity(
    score: Function,
    at_most: float | int,
    group: str,
    groups: Groups = None,
    threshold: float | int = 0.0,
    surrogate: object = "sigmoid",
    temperature: float | int = 1.0,
    judged_by: str = "rate",
    name: str = "demographic_parity",
) -> SampleMeans:
    """Bound the gap between groups in the share of positive decisions.

    The gap is the largest less the smallest share, as `fairlearn.metrics` defines the demographic
    parity difference.

    Args:
        score: Function of (params, one client's data) that returns a number for each sample.
        at_most: The largest gap.
        group: The entry of the data with the group of each sample, by a code.
        groups: The groups' names, for the codes 0, 1, … or as a dict of codes; by default all codes
            that are in the data. A deployment needs the names.
        threshold: The score above which a decision is positive.
        surrogate: What clients descend in place of the rate; see `sensitivity`.
        temperature: How wide the surrogate is.
        judged_by: Whether g is that of the `"rate"` or of the `"surrogate"`.
        name: The name in the history.

    Returns:
        The constraint, for `Problem(constraint=...)`.

    Raises:
        InvalidInput: If the bound is not in [0, 1] or another argument cannot be used.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> bound = fs.constraints.demographic_parity(
        ...     lambda w, data: data["x"] * w, at_most=0.1, group="sex", groups=["men", "women"]
        ... )
        >>> data = {"x": jnp.array([1.0, -1.0, 2.0, 3.0]), "sex": jnp.array([0, 0, 1, 1])}
        >>> float(bound.claimed(bound.counts(1.0, data))["demographic_parity"])
        0.5
    """
    return _Rate("gap", _share("at_most", at_most), None, (None,)).made(locals())


def equal_opportunity(
    score: Function,
    at_most: float | int,
    group: str,
    groups: Groups = None,
    label: str = "y",
    threshold: float | int = 0.0,
    surrogate: object = "sigmoid",
    temperature: float | int = 1.0,
    judged_by: str = "rate",
    name: str = "equal_opportunity",
) -> SampleMeans:
    """Bound the gap between groups in sensitivity.

    Args:
        score: Function of (params, one client's data) that returns a number for each sample.
        at_most: The largest gap.
        group: The entry of the data with the group of each sample, by a code.
        groups: The groups' names, for the codes 0, 1, … or as a dict of codes; by default all codes
            that are in the data. A deployment needs the names.
        label: The entry of the data with the labels, 0 or 1.
        threshold: The score above which a decision is positive.
        surrogate: What clients descend in place of the rate; see `sensitivity`.
        temperature: How wide the surrogate is.
        judged_by: Whether g is that of the `"rate"` or of the `"surrogate"`.
        name: The name in the history.

    Returns:
        The constraint, for `Problem(constraint=...)`.

    Raises:
        InvalidInput: If the bound is not in [0, 1] or another argument cannot be used.

    Example:
        >>> import fedsolve as fs
        >>> bound = fs.constraints.equal_opportunity(
        ...     lambda w, data: data["x"] @ w, at_most=0.1, group="sex", groups=["men", "women"]
        ... )
        >>> [cell.key for cell in bound.cells]
        ['men', 'women']
    """
    return _Rate("gap", _share("at_most", at_most), label, (1,)).made(locals())


def equalized_odds(
    score: Function,
    at_most: float | int,
    group: str,
    groups: Groups = None,
    label: str = "y",
    threshold: float | int = 0.0,
    surrogate: object = "sigmoid",
    temperature: float | int = 1.0,
    judged_by: str = "rate",
    name: str = "equalized_odds",
) -> SampleMeans:
    """Bound the gaps between groups in sensitivity and in false positive rate.

    Args:
        score: Function of (params, one client's data) that returns a number for each sample.
        at_most: The largest gap.
        group: The entry of the data with the group of each sample, by a code.
        groups: The groups' names, for the codes 0, 1, … or as a dict of codes; by default all codes
            that are in the data. A deployment needs the names.
        label: The entry of the data with the labels, 0 or 1.
        threshold: The score above which a decision is positive.
        surrogate: What clients descend in place of the rate; see `sensitivity`.
        temperature: How wide the surrogate is.
        judged_by: Whether g is that of the `"rate"` or of the `"surrogate"`.
        name: The name in the history.

    Returns:
        The constraint, for `Problem(constraint=...)`.

    Raises:
        InvalidInput: If the bound is not in [0, 1] or another argument cannot be used.

    Example:
        >>> import fedsolve as fs
        >>> bound = fs.constraints.equalized_odds(
        ...     lambda w, data: data["x"] @ w, at_most=0.1, group="sex", groups=["men", "women"]
        ... )
        >>> [claim.name for claim in bound.claims]
        ['equalized_odds.y=1', 'equalized_odds.y=0']
    """
    return _Rate("gap", _share("at_most", at_most), label, (1, 0)).made(locals())


def group_loss(
    loss: Function,
    at_most: float | int,
    group: str,
    groups: Groups = None,
    name: str = "group_loss",
) -> SampleMeans:
    """Bound the mean loss of every group.

    Args:
        loss: Function of (params, one client's data) that returns the loss of each sample.
        at_most: The largest mean loss of a group.
        group: The entry of the data with the group of each sample, by a code.
        groups: The groups' names, for the codes 0, 1, … or as a dict of codes; by default all codes
            that are in the data. A deployment needs the names.
        name: The name in the history.

    Returns:
        The constraint, for `Problem(constraint=...)`.

    Raises:
        InvalidInput: If an argument cannot be used.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> bound = fs.constraints.group_loss(
        ...     lambda w, data: (data["x"] - w) ** 2, at_most=1.0, group="site", groups=["a", "b"]
        ... )
        >>> data = {"x": jnp.array([1.0, 2.0, 3.0]), "site": jnp.array([0, 0, 1])}
        >>> {name: float(v) for name, v in bound.claimed(bound.counts(0.0, data)).items()}
        {'group_loss.a': 2.5, 'group_loss.b': 9.0}
    """
    return SampleMeans(
        name=_name(name),
        values=_function("loss", loss),
        kind="at_most",
        bound=_finite("at_most", at_most),
        is_rate=False,
        group=_column("group", group),
        groups=_codes(groups),
    )


def cvar(
    loss: Function,
    at_most: float | int,
    tail: float = 0.9,
    least: float | int = 0.0,
    most: float | int = 10.0,
    levels: int = 41,
    group: str | None = None,
    groups: Groups = None,
    name: str = "cvar",
) -> SampleMeans:
    """Bound the mean of the largest losses: the conditional value at risk.

    CVaR_α = min over t of t + mean of (loss − t)₊ / (1 − α), the mean of the worst 1 − α of the
    samples. Here t is one of `levels` numbers from `least` to `most`, so the value is never below
    CVaR_α and at most one step of t times max(1, α / (1 − α)) above it, if the α-quantile of the
    loss is between them.

    Args:
        loss: Function of (params, one client's data) that returns the loss of each sample.
        at_most: The largest CVaR.
        tail: α.
        least: The least level.
        most: The largest level.
        levels: How many levels there are.
        group: The entry of the data with a group for each sample, by a code: the bound is then for
            every group; None for one bound.
        groups: The groups' names, for the codes 0, 1, … or as a dict of codes; by default all codes
            that are in the data. A deployment needs the names.
        name: The name in the history.

    Returns:
        The constraint, for `Problem(constraint=...)`.

    Raises:
        InvalidInput: If an argument cannot be used.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> bound = fs.constraints.cvar(
        ...     lambda w, data: data["x"] * w, at_most=5.0, tail=0.5, levels=11
        ... )
        >>> data = {"x": jnp.array([1.0, 2.0, 3.0, 4.0])}
        >>> float(bound.claimed(bound.counts(1.0, data))["cvar"])
        3.5
    """
    if not 0 <= _finite("tail", tail) < 1:
        raise InvalidInput(f"tail must be at least 0 and below 1, got {tail}.")
    if not _finite("least", least) < _finite("most", most):
        raise InvalidInput(f"least must be below most, got {least} and {most}.")
    if not isinstance(levels, int) or levels < 2:
        raise InvalidInput(f"levels must be a whole number from 2 up, got {levels!r}.")
    return SampleMeans(
        name=_name(name),
        values=_function("loss", loss),
        kind="tail",
        bound=_finite("at_most", at_most),
        is_rate=False,
        group=None if group is None else _column("group", group),
        groups=_codes(groups),
        tail=float(tail),
        levels=tuple(float(t) for t in np.linspace(least, most, levels)),
    )


BY_NAME: dict[str, Callable[..., SampleMeans]] = {
    each.__name__: each
    for each in (
        sensitivity,
        specificity,
        false_positive_rate,
        demographic_parity,
        equal_opportunity,
        equalized_odds,
        group_loss,
        cvar,
    )
}


def from_table(table: Mapping[str, Any], where: str = "constraint", **given: Any) -> Constraint:
    """Return the constraint that a table of a configuration describes.

    Args:
        table: Its `kind`, the name of one of these functions, the function's arguments, and `per`:
            `"all"` for a bound over all clients' samples, or `"client"` for one at every client
            (`EachClient`), perhaps with the `share` of clients that must satisfy it.
        where: The name of the table, for messages.
        **given: What the problem knows: `score`, `loss`, `label`, `group`, `groups`. A function
            that does not take one of them does without.

    Returns:
        The constraint.

    Raises:
        InvalidInput: If a key is unknown or missing, or a value cannot be used.

    Example:
        >>> import fedsolve as fs
        >>> bound = fs.constraints.from_table(
        ...     {"kind": "sensitivity", "at_least": 0.9}, score=lambda w, data: data["x"] @ w
        ... )
        >>> bound.bound
        0.9
    """
    if not isinstance(table, Mapping) or not isinstance(table.get("kind"), str):
        raise InvalidInput(f"{where} takes a table with its kind: {', '.join(BY_NAME)}.")
    kind = table["kind"]
    if kind not in BY_NAME:
        raise InvalidInput(f"{where}.kind: {_unknown(kind, BY_NAME, 'constraint')}")
    accepted = inspect.signature(BY_NAME[kind]).parameters
    own = {key: value for key, value in table.items() if key not in ("kind", "per", "share")}
    per, share = table.get("per", "all"), table.get("share")
    if per not in ("all", "client"):
        raise InvalidInput(f'{where}.per must be "all" or "client", got {per!r}.')
    if share is not None and per == "all":
        raise InvalidInput(f'{where}.share is for per = "client".')
    for key in own:
        if key not in accepted or key in ("score", "loss"):
            known = [name for name in accepted if name not in ("score", "loss")]
            raise InvalidInput(f"{where}.{_unknown(key, known, f'field of {kind}')}")
    wanted = {k: v for k, v in given.items() if k in accepted and v is not None}
    takes_group = "group" in accepted and accepted["group"].default is inspect.Parameter.empty
    if not takes_group and "group" not in own:  # then the bound is for all samples
        wanted = {k: v for k, v in wanted.items() if k not in ("group", "groups")}
    arguments = wanted | own
    needed = [
        name
        for name, field in accepted.items()
        if field.default is inspect.Parameter.empty and name not in arguments
    ]
    if needed:
        raise InvalidInput(f"{where} needs {needed[0]} ({kind} has no default for it).")
    try:
        made = BY_NAME[kind](**arguments)
        return made if per == "all" else EachClient(made, 1.0 if share is None else share)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error


def _unknown(name: str, known: Any, what: str) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}."
    return f"{name!r} is not a known {what}; {hint}"


class _Turned:
    """The score with its sign turned, so that a decision is that of the negative class."""

    def __init__(self, score: Function):
        self.score = score

    def __call__(self, params: PyTree, data: PyTree, *extra: PyTree) -> PyTree:
        return -self.score(params, data, *extra)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Turned) and self.score == other.score

    def __hash__(self) -> int:
        return hash((type(self), self.score))


class _Rate:
    """What the functions of rates share."""

    def __init__(
        self,
        kind: str,
        bound: float,
        label: str | None,
        labels: tuple[int | None, ...],
        turned: bool = False,
    ):
        self.kind, self.bound, self.turned = kind, bound, turned
        self.label, self.labels = label, labels

    def made(self, given: Mapping[str, Any]) -> SampleMeans:
        """Return the constraint that the arguments of a function describe."""
        score = _function("score", given["score"])
        judged_by, threshold = given["judged_by"], _finite("threshold", given["threshold"])
        if judged_by not in JUDGES:
            raise InvalidInput(f'judged_by must be "rate" or "surrogate", got {judged_by!r}.')
        needs_group = self.kind == "gap"
        group = given["group"]
        made = SampleMeans(
            name=_name(given["name"]),
            values=_Turned(score) if self.turned else score,
            kind=self.kind,
            bound=self.bound,
            label=None if self.label is None else _column("label", self.label),
            labels=self.labels,
            group=_column("group", group) if needs_group or group is not None else None,
            groups=_codes(given["groups"]),
            threshold=-threshold if self.turned else threshold,
            surrogate=as_surrogate(given["surrogate"], given["temperature"], needs_group),
            judged_by=judged_by,
        )
        if needs_group and made.groups is not None and len(made.groups) < 2:
            raise InvalidInput(f"{made.name} is a gap: it needs two groups at least.")
        return made


def _share(name: str, value: object) -> float:
    number = _finite(name, value)
    if not 0 <= number <= 1:
        raise InvalidInput(f"{name} is a rate, from 0 to 1, got {value}.")
    return number


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidInput(f"{name} must be a number, got {value!r}.")
    if not np.isfinite(value):
        raise InvalidInput(f"{name} must be finite, got {value}.")
    return float(value)


def _function(name: str, value: object) -> Function:
    if not callable(value):
        raise InvalidInput(f"{name} must be a function of (params, data), got {value!r}.")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"name must be a word, got {value!r}.")
    return value


def _column(what: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{what} must be the name of an entry of the data, got {value!r}.")
    return value


def _codes(groups: object) -> tuple[tuple[str, int], ...] | None:
    """Return groups as names with their codes."""
    if groups is None:
        return None
    if isinstance(groups, Mapping):
        pairs = list(groups.items())
    elif isinstance(groups, Sequence) and not isinstance(groups, str):
        pairs = [(name, code) for code, name in enumerate(groups)]
    else:
        raise InvalidInput(f"groups must be names, or a dict of codes by name, got {groups!r}.")
    if not all(isinstance(n, str) and isinstance(c, int | np.integer) for n, c in pairs):
        raise InvalidInput(f"groups must be names, or a dict of codes by name, got {groups!r}.")
    if not pairs or len({c for _, c in pairs}) < len(pairs) or len(dict(pairs)) < len(pairs):
        raise InvalidInput(f"groups must have different names and codes, got {groups!r}.")
    return tuple((name, int(code)) for name, code in pairs)
