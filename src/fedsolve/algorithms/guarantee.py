"""What a theorem requires and guarantees."""

from __future__ import annotations

import dataclasses


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
        probability: The probability of both bounds together.
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
    probability: float
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

    def __str__(self) -> str:
        what = "mean ‖w − ŵ(w)‖" if self.is_stationarity else "f(w̄) − f*"
        soft = "" if self.beta is None else f", β = {self.beta:.6g}"
        lines = [
            self.theorem,
            f"  set      η = {self.step_size:.6g}, ε = {self.tolerance:.6g}{soft}",
            f"  promise  {what} ≤ {self.bound:.6g} and g ≤ {self.constraint_bound:.6g}"
            + (f", with probability {self.probability:g}" if self.probability < 1 else ""),
            "  unchecked",
        ]
        return "\n".join(lines + [f"  - {sentence}" for sentence in self.unchecked])
