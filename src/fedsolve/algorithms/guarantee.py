"""What a theorem requires and guarantees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import equinox as eqx

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_positive
from fedsolve.types import Flag, PyTree

EXPECTED = "The bound is one in expectation over the compressors' draws; a run may exceed it."


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """The step size and tolerance that a theorem requires, and the bounds that it then guarantees.

    Args:
        theorem: The name of the theorem.
        step_size: η.
        tolerance: ε.
        gamma: Γ, the price of local steps and compression (Theorem 9: G_eff/G²).
        bound: f(w̄) − f* ≤ `bound`; for Theorem 10, the mean of ‖w_t − ŵ(w_t)‖ over feasible rounds.
        constraint_bound: g(w̄) ≤ `constraint_bound`; for Theorem 10, the mean of g(w_t).
        probability: The probability of both bounds together; None where the bound on f(w̄) − f* is
            on its expectation (see `with_probability`).
        beta: β, for soft switching only.
        multiplier: Λ, for Theorem 10 only.
        unchecked: The assumptions that were not verified.
        rounds: T.
        local_steps: E.
        clients: n.
        participants: m.
        distance: D.
        q: The uplink compressor's constant.
        q_0: The downlink compressor's constant.
        q_u: The constant of an unbiased uplink.
        stochastic: Whether gradients may be those of minibatches.

    Example:
        >>> import fedsolve as fs
        >>> guarantee = fs.theory.fedsgm(rounds=100, distance=1.0, lipschitz=1.0)
        >>> guarantee.theorem, round(guarantee.step_size, 3)
        ('FedSGM, Theorem 3 (Theorem 1, full participation)', 0.05)
    """

    theorem: str
    step_size: float
    tolerance: float
    gamma: float
    bound: float
    constraint_bound: float
    probability: float | None
    beta: float | None
    multiplier: float | None
    unchecked: tuple[str, ...]
    rounds: int
    local_steps: int
    clients: int
    participants: int
    distance: float
    q: float
    q_0: float
    q_u: float
    stochastic: bool

    @property
    def is_stationarity(self) -> bool:
        """Whether `bound` is about ‖w − ŵ(w)‖, since f is not convex."""
        return self.multiplier is not None

    def with_probability(self, probability: float | int, multiplier: float | int) -> Guarantee:
        """Turn a bound on an expectation into one that holds with a probability, by Markov.

        f(w̄) − f* ≥ −λ* g(w̄) ≥ −λ* `constraint_bound`, where λ* is a Lagrange multiplier of g at w*.
        So f(w̄) − f* + λ* `constraint_bound` is not negative, and Markov's inequality applies.

        Args:
            probability: The probability, between 0 and 1.
            multiplier: λ*, or a bound on it; 0 without a constraint.

        Returns:
            The guarantee with a larger `bound`, which lists what was assumed.

        Raises:
            InvalidInput: If the bounds are not on expectations, or a number is out of range.

        Example:
            >>> import fedsolve as fs
            >>> mean = fs.theory.fedsgm(distance=1.0, lipschitz=1.0, rounds=100, clients=4, q_u=1)
            >>> mean.probability, round(mean.bound, 4)
            (None, 0.2062)
            >>> round(mean.with_probability(0.9, multiplier=0.5).bound, 4)
            2.9893
        """
        if self.probability is not None:
            raise InvalidInput(
                f"The bounds of {self.theorem} hold with probability {self.probability:g} already."
            )
        if not 0 < probability < 1:
            raise InvalidInput(f"probability must be between 0 and 1, got {probability}.")
        check_positive("multiplier", multiplier, zero=True)
        below = multiplier * self.constraint_bound
        unchecked = [sentence for sentence in self.unchecked if sentence != EXPECTED]
        return dataclasses.replace(
            self,
            bound=(self.bound + below) / (1 - probability) - below,
            probability=float(probability),
            unchecked=(*unchecked, f"g has a Lagrange multiplier of at most {multiplier:g} at w*."),
        )

    def _how_sure(self) -> str:
        if self.probability is None:
            return ", in expectation"
        return f", with probability {self.probability:g}" if self.probability < 1 else ""

    def __str__(self) -> str:
        what = "mean ‖w − ŵ(w)‖" if self.is_stationarity else "f(w̄) − f*"
        soft = "" if self.beta is None else f", β = {self.beta:.6g}"
        lines = [
            self.theorem,
            f"  set      η = {self.step_size:.6g}, ε = {self.tolerance:.6g}{soft}",
            f"  promise  {what} ≤ {self.bound:.6g} and g ≤ {self.constraint_bound:.6g}"
            + self._how_sure(),
            "  unchecked",
        ]
        return "\n".join(lines + [f"  - {sentence}" for sentence in self.unchecked])


class AfterEpochs(eqx.Module):
    """A stopping rule: stop after a number of epochs; the history has ‖∇f(w)‖² if wanted."""

    count: int = eqx.field(static=True)
    gradient: bool = eqx.field(static=True, default=False)

    def __call__(self, entry: Mapping[str, PyTree]) -> Flag:
        return entry["epochs"] >= self.count


@dataclasses.dataclass(frozen=True)
class PPBCGuarantee:
    """Step size, θ and the bound of a theorem on PPBC or PPBC+, and the cost of a run.

    Args:
        theorem: The name of the theorem.
        step_size: γ.
        momentum: θ, the largest that the theorem allows.
        epoch_end: p.
        bound: A bound on (1/K) Σ E‖∇f(x^{k,0})‖² over the epochs' starts, or, if
            `strongly_convex`, on E‖x^{K,0} − x*‖².
        epochs: K, epochs that are not empty.
        largest: The largest γ that the theorem allows.
        clients: M.
        participants: C.
        cap: α.
        availability: The least q_m; None for PPBC.
        strongly_convex: Whether f is strongly convex.
        strong_convexity: μ; None if f is not.
        stochastic: Whether gradients may be those of minibatches.
        unchecked: The assumptions that were not verified.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.theory.ppbc(
        ...     clients=4, participants=1, smoothness=1.0, gap=0.5, epochs=100, cap=1.0
        ... )
        >>> found.iterations, found.communications
        (400.0, 800.0)
    """

    theorem: str
    step_size: float
    momentum: float
    epoch_end: float
    bound: float
    epochs: int
    largest: float
    clients: int
    participants: int
    cap: float
    availability: float | None
    strongly_convex: bool
    strong_convexity: float | None
    stochastic: bool
    unchecked: tuple[str, ...]

    @property
    def iterations(self) -> float:
        """The expected iterations (rounds) of K epochs, K/p."""
        return self.epochs / self.epoch_end

    @property
    def communications(self) -> float:
        """The expected messages from clients, K(C/p + M): 2MK for p = C/M."""
        return self.epochs * (self.participants / self.epoch_end + self.clients)

    @property
    def rounds(self) -> int:
        """Rounds that almost surely (six standard deviations) hold K epochs."""
        spread = math.sqrt(self.epochs * (1 - self.epoch_end)) / self.epoch_end
        return math.ceil(self.iterations + 6 * spread + 20 * (1 / self.epoch_end - 1))

    @property
    def stop(self) -> AfterEpochs:
        """The rule that ends a run after K epochs, and records what the theorem is about."""
        return AfterEpochs(self.epochs, gradient=not self.strongly_convex)

    @property
    def quantity(self) -> str:
        """What the bound is about."""
        return "‖x^{K,0} − x*‖²" if self.strongly_convex else "mean ‖∇f(x^{k,0})‖²"

    def __str__(self) -> str:
        lines = [
            self.theorem,
            f"  set      γ = {self.step_size:.6g}, θ = {self.momentum:.6g}, "
            f"p = {self.epoch_end:.6g}, α = {self.cap:.6g}",
            f"  promise  {self.quantity} ≤ {self.bound:.6g} after {self.epochs} epochs",
            f"  cost     {self.iterations:.6g} iterations and {self.communications:.6g} "
            "communications expected",
            "  unchecked",
        ]
        return "\n".join(lines + [f"  - {sentence}" for sentence in self.unchecked])
