"""What a theorem asks for, and what it promises then."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """What a theorem asks for, and what it promises then.

    - `step_size`, `tolerance`, `beta`: η, ε, and β (soft switching only).
    - `gamma`: Γ, the price of local steps and compression (Theorem 9: G_eff/G²).
    - `bound`: f(w̄) − f* ≤ `bound`; for Theorem 10, the mean of ‖w_t − ŵ(w_t)‖ over feasible rounds.
    - `constraint_bound`: g(w̄) ≤ `constraint_bound`; for Theorem 10, the mean of g(w_t).
    - `probability`: of the two together.
    - `multiplier`: Λ (Theorem 10 only).
    - `theorem`: whose promise it is. `unchecked`: what it rests on and nobody has checked.

    The rest is what it is about: `distance` is D; `q`, `q_0` and `q_u` are the compressors'
    constants; `stochastic` says whether gradients may be those of minibatches.
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
        """Whether `bound` is about ‖w − ŵ(w)‖, as f is not convex."""
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
