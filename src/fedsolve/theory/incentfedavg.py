"""What IncentFedAvg is promised: step sizes and bounds of Theorems 4.5 and 4.8, Lemma 4.3's rate.

Paper: "Incentive-Aware Federated Averaging with Performance Guarantees under Strategic
Participation", sections 4 and 6.

| here | paper | |
|---|---|---|
| `smoothness` | L | of every f_i |
| `noise` | ν | of stochastic gradients |
| `dissimilarity` | G, B | (1/m) Σ ‖∇f_i‖² ≤ G² + B²‖∇f‖² (4.5), ≤ G² + 2LB²(f − f*) (4.8) |
| `local_steps`, `rounds` | H, R | |
| `first` | r̂ | the round from which on iterates are averaged |
| `rate` | ρ | 1 − μ_F γ̃ / 2 |
| `delta` | δ_0 | (m − 1)‖N̂_0 − N*‖ / ‖N*‖_1 |

Where the printed statement and its proof differ, the proof is followed:
- Theorem 4.5 has γ̃ ≤ μ_F/L² in print (L_F² is meant) and a last term m²(m + 1)G²(1 + 2Lγ)/‖N*‖_1
  that its proof does not have. Its proof needs γ ≤ 1/(√3 HL), too (Lemma 4.11).
- Theorem 4.8 bounds the sum of consensus errors over all rounds by Lemma 6.9, which is for one
  round. Summed over R − r̂ rounds, the second term is 72γ²L(ν² + mG²)H², not that times
  H/(T_R − T_r̂). Lemma 6.8 needs δ_r̂ ≤ 1 besides.
- Lemma 6.7 bounds Σ ‖∇f_i‖² by G² + 2LB²(f − f*), which Lemma 6.5 proves of the mean: m times as
  much is meant. So the last term of Theorem 4.8 has mG², and r̂ is where δ_r̂³ ≤ 1/(16m²L²B⁴), so
  that Lemma 6.8 still has its 1/4.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_kind, check_positive
from fedsolve.games import Game


@dataclasses.dataclass(frozen=True)
class Participation:
    """Lemma 4.3: ‖N̂_r − N*‖ ≤ `distance`·`rate`^r and |p_{i,r} − p_i*| ≤ `delta`·`rate`^r, for the
    game's step size. `exact` if μ_F and L_F are (otherwise they are estimates)."""

    step_size: float
    rate: float
    distance: float
    delta: float
    exact: bool


@dataclasses.dataclass(frozen=True)
class IncentGuarantee:
    """What a theorem asks for, and what it promises then.

    - `step_size`, `game_step_size`: γ and γ̃.
    - `first`: r̂. Promises are about rounds from there to R − 1.
    - `bound`: on E‖∇f(x̄)‖² at a random iterate (Theorem 4.5), or on E f(x̄_avg) − f* (Theorem 4.8).
    - `equilibrium_bound`: on E‖N̂_r − N*‖² at a random round.
    - `largest`: the largest γ that the theorem allows. `unchecked`: what nobody has checked.
    """

    theorem: str
    step_size: float
    game_step_size: float
    first: int
    bound: float
    equilibrium_bound: float
    largest: float
    participation: Participation
    unchecked: tuple[str, ...]


def participation(game: Game, start: Any, step_size: float | None = None) -> Participation:
    """Lemma 4.3 for a game and a start N̂_0; with the largest step μ_F/L_F² unless told."""
    check_kind("game", game, Game)
    begin = game.check_profile(start)
    constants = game.monotonicity()
    if constants.strong <= 0:
        raise InvalidInput(
            f"Lemma 4.3 needs a strongly monotone game; μ_F is {constants.strong:.3g}. "
            "Add regularization."
        )
    most = constants.step_size
    step = most if step_size is None else step_size
    check_positive("step_size", step)
    if step > most * (1 + 1e-12):
        raise InvalidInput(
            f"step_size {step:g} is above μ_F/L_F² = {most:g}: nothing is promised there."
        )
    best = game.equilibrium()
    distance = float(np.linalg.norm(begin - best))
    return Participation(
        step_size=step,
        rate=1 - 0.5 * constants.strong * step,
        distance=distance,
        delta=(game.players - 1) * distance / float(np.abs(best).sum()),
        exact=constants.exact,
    )


def incentfedavg(
    game: Game,
    start: Any,
    rounds: int,
    *,
    local_steps: int,
    smoothness: float | int,
    noise: float | int,
    dissimilarity: tuple[float, float],
    gap: float | int | None = None,
    distance: float | int | None = None,
    optimum_gradients: float | int = 0.0,
    game_step_size: float | None = None,
    step_size: float | int | None = None,
) -> IncentGuarantee:
    """γ, γ̃ and the promised bounds.

    With `gap`, f(x̄) − f* at round r̂ or a bound on it: Theorem 4.5 (smooth, not convex). With
    `distance`, ‖x̄ − x*‖ there, and `optimum_gradients`, Σ ‖∇f_i(x*)‖²: Theorem 4.8 (convex).
    γ is 1/√(RH), as in their parts (ii), or the largest that is allowed where that is less.
    """
    for name, value in (("rounds", rounds), ("local_steps", local_steps)):
        check_count(name, value)
    check_positive("smoothness", smoothness)
    for name, value in (("noise", noise), ("optimum_gradients", optimum_gradients)):
        check_positive(name, value, zero=True)
    G, B = map(float, dissimilarity)
    check_positive("dissimilarity", np.asarray([G, B]), zero=True)
    if (gap is None) == (distance is None):
        raise InvalidInput("Give gap (Theorem 4.5) or distance (Theorem 4.8, convex), one of them.")
    if distance is not None and B < 1:
        raise InvalidInput(f"In the convex case B is at least 1 (Lemma 6.5), got {B:g}.")
    check_positive("gap" if distance is None else "distance", gap or distance or 0.0, zero=True)

    m, H, R, L, nu = game.players, local_steps, rounds, float(smoothness), float(noise)
    learned = participation(game, start, game_step_size)
    rho, delta = learned.rate, learned.delta
    convex = distance is not None
    if convex:
        reach = max(delta * (4 * m * L * B**2) ** (2 / 3), delta)
        slow = m * H * math.sqrt(delta) / (1 - math.sqrt(rho))
        limits = [1 / (16 * L), 1 / (2 * m * L), 1 / (math.sqrt(3) * H * L)]
        limits += [1 / (slow + 24 * L * H * B * math.sqrt(m))]
        limits += [1 / (16 * L * m**2 * B**2 * delta)] if delta else []
    else:
        reach = math.sqrt(17) * m * delta * B
        slow = 0.0
        limits = [1 / (32 * L), 1 / (math.sqrt(3) * H * L)]
        limits += [math.sqrt(2 / 153) / (m * B * H * L)] if B else []
    first = max(0, math.ceil(math.log(reach) / math.log(1 / rho))) if reach > 0 else 0
    if first > R - 1:
        raise InvalidInput(
            f"{R} rounds are too few: the participation has to settle first, and promises begin "
            f"after round {first}."
        )
    largest = min(limits)
    gamma = min(largest, 1 / math.sqrt(R * H)) if step_size is None else float(step_size)
    check_positive("step_size", gamma)
    if gamma > largest * (1 + 1e-12):
        raise InvalidInput(f"step_size {gamma:g} is above {largest:.6g}, the most allowed here.")

    steps = (R - first) * H
    settled = (rho ** (2 * first) - rho ** (2 * R)) / ((1 - rho**2) * (R - first))
    if convex:
        bound = (
            4 * float(distance) ** 2 / (gamma * steps)
            + 72 * gamma**2 * L * (nu**2 + m * G**2) * H**2
            + 4 * gamma * nu**2
            + 16 * gamma * m**2 * delta**2 * G**2 * H / (steps * (1 - rho**2))
            + 4 * delta**1.5 * (m * G**2 + float(optimum_gradients)) * H / (steps * (1 - rho**1.5))
        ) / (1 - slow * gamma)
    else:
        bound = (
            16 * float(gap or 0.0) / (gamma * steps)
            + 8 * L * gamma * nu**2
            + 76.5 * (nu**2 + m * G**2) * m * L**2 * H**2 * gamma**2
            + 16 * m**2 * delta**2 * G**2 * (1 + 2 * L * gamma) * settled
        )
    unchecked = ["L, ν, G and B hold wherever the run goes."]
    if first > 0:
        what = "‖x̄ − x*‖" if convex else "f(x̄) − f*"
        unchecked.append(f"{what} after round r̂ = {first}, known only then, is what was given.")
    if H > 1:
        unchecked.append(
            "Every step's gradient is unbiased, whatever was drawn before (Assumption 2.1): but a "
            "round's steps are on one subset of a client's samples."
        )
    if convex:
        unchecked.append("Every f_i is convex and has a minimiser.")
    if not learned.exact:
        unchecked.append("μ_F and L_F are estimates.")
    return IncentGuarantee(
        theorem="Theorem 4.8" if convex else "Theorem 4.5",
        step_size=gamma,
        game_step_size=learned.step_size,
        first=first,
        bound=bound,
        equilibrium_bound=settled * learned.distance**2,
        largest=largest,
        participation=learned,
        unchecked=tuple(unchecked),
    )


def convex_dissimilarity(
    weights: Any, smoothness: float | int, optimum: float | int, own_optima: Any
) -> tuple[float, float]:
    """G and B of Lemma 6.5: for convex f_i ≥ 0 with weights p*, from f* and every client's f_i*."""
    p, own = np.asarray(weights, float), np.asarray(own_optima, float)
    if p.shape != own.shape or p.ndim != 1 or (p <= 0).any() or not np.isclose(p.sum(), 1):
        raise InvalidInput("weights must be positive and add up to 1, one for each of own_optima.")
    if (own < 0).any():
        raise InvalidInput("Lemma 6.5 is for f_i ≥ 0; own_optima has a negative value.")
    spread = float(np.abs(1 / (len(p) * p) - 1).max())
    square = 2 * float(smoothness) * (float(optimum) - own.mean() + spread * float(optimum))
    return math.sqrt(max(square, 0.0)), math.sqrt(1 + spread)
