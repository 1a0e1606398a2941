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
        bound: f(w̄) − f* ≤ `bound`; for Theorem 10, the mean of ‖w_t − ŵ(w_t)‖ over feasible
            rounds.
        constraint_bound: g(w̄) ≤ `constraint_bound`; for Theorem 10, the mean of g(w_t).
        probability: The probability of both bounds together.
        beta: β; None for hard switching.
        multiplier: Λ, for Theorem 10; else None.
        unchecked: Assumptions that were not verified.
        rounds: T.
        local_steps: E.
        clients: n.
        participants: m.
        distance: D.
        q: The constant of the uplink's compressor.
        q_0: The constant of the downlink's compressor.
        q_u: The constant of an unbiased uplink.
        stochastic: Whether gradients may be those of minibatches.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: jnp.sum(jnp.abs(w - data["target"])),
        ...     clients={"target": jnp.eye(3)},
        ...     params=jnp.zeros(3),
        ...     constraint=lambda w, data: jnp.sum(w) - 0.5,
        ...     domain=fs.Ball(1.0),
        ... )
        >>> algorithm = fs.FedSGM.from_theory(problem, rounds=100)
        >>> algorithm.guarantee.step_size == algorithm.step_size
        True
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
