"""Accounting: what a run with noise has spent, as (ε, δ).

Every sum that leaves a round is a Gaussian mechanism with the multiplier z = σ/Δ, where σ is the
standard deviation of its noise and Δ its sensitivity. Sums of one round come from one cohort; they
compose to one Gaussian mechanism with 1/z² = Σ 1/z_i². Rounds and evaluations compose by Rényi
divergences (RDP) or by privacy loss distributions (PLD), both of the package `dp-accounting`.

| clients of a round | neighbours: two federations that differ in | sensitivity Δ of a sum |
|---|---|---|
| everyone, or a cohort that may be known | one client, who answers zeros in one of them | C |
| Poisson: each with probability q | one client, who answers zeros in one of them | C |
| m of n without replacement | the data of one client | 2C |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.federation.state import State
from fedsolve.runtimes.history import History

Curve = Float[np.ndarray, " orders"]  # Rényi divergences at ORDERS
ORDERS = (1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 4.5, *range(5, 65), 80, 96, 128, 192, 256, 512)
ACCOUNTANTS = ("rdp", "pld")
MOST_ROUNDS = 2**30


class Sampling(NamedTuple):
    """How the clients of a round are drawn, as far as it makes a client's part less certain.

    Args:
        kind: `"none"`, `"fixed"` (a fixed number without replacement) or `"poisson"`.
        clients: The number of clients n.
        expected: The (expected) number of clients in a round.
    """

    kind: str
    clients: int
    expected: float

    @property
    def sensitivity(self) -> float:
        """The sensitivity of a sum in units of the clip."""
        return 2.0 if self.kind == "fixed" else 1.0


@dataclasses.dataclass(frozen=True)
class Accountant:
    """What rounds and evaluations of a run cost.

    Args:
        round: The multiplier z of all sums of a round together; infinite if there are none.
        evaluation: The multiplier of an evaluation; infinite if it costs nothing.
        sampling: How the clients of a round are drawn.
        delta: δ.
        method: `"rdp"` or `"pld"`.
    """

    round: float
    evaluation: float
    sampling: Sampling
    delta: float
    method: str = "rdp"

    def __post_init__(self):
        if self.method not in ACCOUNTANTS:
            raise InvalidInput(f'accountant must be "rdp" or "pld", got {self.method!r}.')
        if self.method == "pld" and self.sampling.kind == "fixed":
            raise InvalidInput(
                'accountant="pld" has no bound for cohorts of a fixed size: take "rdp", or draw '
                "clients by fs.participation.Poisson(rate)."
            )

    def epsilon(self, rounds: int, evaluations: int) -> float:
        """Return ε after some rounds and evaluations."""
        if rounds == 0 and evaluations == 0:
            return 0.0
        if self.method == "pld":
            return self._by_distributions(rounds, evaluations)
        return epsilon_of(rounds * self._round_curve + evaluations * self._other_curve, self.delta)

    def affordable(self, epsilon: float, most: int, evaluations: Callable[[int], int]) -> int:
        """Return the largest number of rounds up to `most` that cost at most ε.

        Args:
            epsilon: ε.
            most: The largest number of interest.
            evaluations: The number of evaluations in that many rounds.
        """
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.epsilon(middle, evaluations(middle)) <= epsilon:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def _round_curve(self) -> Curve:
        if "round" not in self._curves:
            self._curves["round"] = curve(self.round, self.sampling)
        return self._curves["round"]

    @property
    def _other_curve(self) -> Curve:
        if "evaluation" not in self._curves:
            whole = self.sampling._replace(kind="none")
            self._curves["evaluation"] = curve(self.evaluation, whole)
        return self._curves["evaluation"]

    _curves: dict[str, Curve] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def _by_distributions(self, rounds: int, evaluations: int) -> float:
        accounting = package()
        accountant = accounting.pld.PLDAccountant()
        whole = accounting.GaussianDpEvent(self.round)
        if self.sampling.kind == "poisson":
            rate = self.sampling.expected / self.sampling.clients
            whole = accounting.PoissonSampledDpEvent(rate, whole)
        if rounds and math.isfinite(self.round):
            accountant.compose(whole, rounds)
        if evaluations and math.isfinite(self.evaluation):
            accountant.compose(accounting.GaussianDpEvent(self.evaluation), evaluations)
        return float(accountant.get_epsilon(self.delta))


def together(multipliers: list[float]) -> float:
    """Return the multiplier of several Gaussian mechanisms on the same clients."""
    total = sum(1 / z**2 for z in multipliers)
    return math.inf if total == 0 else 1 / math.sqrt(total)


@functools.lru_cache(maxsize=1024)
def curve(multiplier: float, sampling: Sampling) -> Curve:
    """Return the Rényi divergences of one sampled Gaussian mechanism."""
    orders = np.asarray(ORDERS, float)
    if math.isinf(multiplier):
        return np.zeros(len(orders))
    whole = orders / (2 * multiplier**2)  # known of whom the cohort is: always a bound
    if sampling.kind == "none" or sampling.expected >= sampling.clients:
        return whole
    accounting = package()
    event = accounting.GaussianDpEvent(multiplier)
    if sampling.kind == "poisson":
        accountant = accounting.rdp.RdpAccountant(ORDERS)
        event = accounting.PoissonSampledDpEvent(sampling.expected / sampling.clients, event)
    else:
        relation = accounting.NeighboringRelation.REPLACE_ONE
        accountant = accounting.rdp.RdpAccountant(ORDERS, relation)
        event = accounting.SampledWithoutReplacementDpEvent(
            sampling.clients, round(sampling.expected), event
        )
    with _quiet():
        accountant.compose(event)
    # The accountant does not hand out its curve.
    return np.fmin(np.asarray(accountant._rdp, float), whole)


def epsilon_of(divergences: Curve, delta: float) -> float:
    """Return the ε of Rényi divergences at δ."""
    accounting = package()
    known = np.isfinite(divergences)
    if not known.any():
        return math.inf
    orders = [order for order, good in zip(ORDERS, known, strict=True) if good]
    with _quiet():
        found, _ = accounting.rdp.rdp_privacy_accountant.compute_epsilon(
            orders, divergences[known], delta
        )
    return float(found)


def least_scale(epsilon: float, cost: Callable[[float], float]) -> float:
    """Return the smallest scale of the noise whose cost is at most ε, to a part in a thousand."""
    high = 1.0
    while cost(high) > epsilon:
        high *= 2
        if high > 2**40:
            raise InvalidInput(f"No noise keeps ε below {epsilon:g}; a larger δ would do.")
    low = high / 2 if high > 1 else 0.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if middle > 0 and cost(middle) <= epsilon:
            high = middle
        else:
            low = middle
    return high


class Spent(NamedTuple):
    """What a state knows about its spending, beside the number of its rounds."""

    evaluations: Int[Array, ""]
    mechanism: Float[Array, "5"]  # what must stay as it is when a run goes on

    @classmethod
    def unknown(cls) -> Spent:
        """Return one for its shapes alone."""
        return cls(jnp.int32(0), jnp.zeros(5, jnp.float32))


@dataclasses.dataclass
class Ledger:
    """Writes ε in the history of a run, and keeps count in its state.

    Args:
        accountant: What rounds and evaluations cost.
        noise: By column of the history, the standard deviation of the noise in its values.
    """

    accountant: Accountant
    noise: dict[str, float] = dataclasses.field(default_factory=dict)

    def start(self, state: State) -> State:
        """Return a first state, which has spent nothing."""
        return dataclasses.replace(state, spent=Spent(jnp.int32(0), self._mechanism))

    @property
    def _mechanism(self) -> Float[Array, "5"]:
        known, sampling = self.accountant, self.accountant.sampling
        kind = float(("none", "fixed", "poisson").index(sampling.kind))
        numbers = known.round, known.evaluation, kind, sampling.clients, sampling.expected
        return jnp.asarray(numbers, jnp.float32)

    def check(self, state: State) -> None:
        """Raise if a state to go on from was made with other noise, or without."""
        if state.spent is None:
            raise InvalidInput(
                "The rounds before were played without privacy, and cannot be covered afterwards: "
                "begin a new run."
            )
        same = np.allclose(np.asarray(state.spent.mechanism), np.asarray(self._mechanism))
        if not same:
            raise InvalidInput(
                "The rounds before were played with other noise, so this run would spend its "
                "budget twice: go on with the same privacy, or begin a new run."
            )

    def enter(self, state: State, entries: History) -> tuple[State, History]:
        """Count the evaluations of some rounds, and add ε to their entries."""
        before, spent = int(state.spent.evaluations), []
        for number, stop in enumerate(entries["round"]):
            spent.append(self.accountant.epsilon(int(stop), before + number + 1))
        if not spent:
            return state, entries
        counted = state.spent._replace(evaluations=jnp.int32(before + len(spent)))
        noise = {
            f"{name}_noise": np.full(len(spent), deviation)
            for name, deviation in self.noise.items()
            if name in entries
        }
        entries = History({**entries, "epsilon": np.asarray(spent), **noise})
        return dataclasses.replace(state, spent=counted), entries


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence notes about orders that have no bound; they are left out."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def package() -> Any:
    """Return the package `dp_accounting`; raise if it is not installed."""
    try:
        import dp_accounting
        from dp_accounting import pld, rdp  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            "Accounting of privacy needs dp-accounting: pip install 'fedsolve[privacy]'."
        ) from error
    return dp_accounting
