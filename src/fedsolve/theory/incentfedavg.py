"""Guarantees of IncentFedAvg: step sizes and bounds of Theorems 4.5 and 4.8, and Lemma 4.3's rate.

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

Algorithm 1 averages the models with p_{r+1} (lines 12 and 13). Lemma 4.2 and (6) write x̄_k with
p_r, with which x̄ would jump where weights change. Here x̄_k = Σ p_{i,r+1} x_{i,k} in round r: then
Lemma 4.2 holds for Algorithm 1 as it is, x̄ is x̂_r at the beginning of every round, and the proofs
hold with δ_{r+1} ≤ δ_r in place of δ_r.

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
from collections.abc import Mapping

import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_kind, check_positive
from fedsolve.games import Game
from fedsolve.types import ArrayLike


@dataclasses.dataclass(frozen=True)
class Participation:
    """The rate at which contributions settle, by Lemma 4.3.

    ‖N̂_r − N*‖ ≤ `distance`·`rate`^r and |p_{i,r} − p_i*| ≤ `delta`·`rate`^r.

    Args:
        step_size: γ̃, the step size of the game.
        rate: ρ.
        distance: ‖N̂_0 − N*‖.
        delta: δ_0.
        exact: Whether μ_F and L_F are exact; otherwise they are estimates.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.theory.Participation(1.0, rate=0.5, distance=2.0, delta=0.1, exact=True)
        >>> found.distance * found.rate**10 < 0.002
        True
    """

    step_size: float
    rate: float
    distance: float
    delta: float
    exact: bool


@dataclasses.dataclass(frozen=True)
class IncentGuarantee:
    """Step sizes and bounds of Theorem 4.5 or 4.8.

    The bounds are about the rounds from `first` to R − 1.

    Args:
        theorem: The theorem that applies.
        step_size: γ.
        game_step_size: γ̃.
        first: r̂, the round from which on iterates are averaged.
        bound: A bound on E‖∇f(x̄)‖² at a random iterate (Theorem 4.5), or on E f(x̄_avg) − f*
            (Theorem 4.8).
        equilibrium_bound: A bound on E‖N̂_r − N*‖² at a random round.
        largest: The largest γ that the theorem allows.
        participation: The constants of Lemma 4.3.
        unchecked: The assumptions that were not checked.

    Example:
        >>> import fedsolve as fs
        >>> learned = fs.theory.Participation(1.0, rate=0.5, distance=2.0, delta=0.1, exact=True)
        >>> found = fs.theory.IncentGuarantee(
        ...     "Theorem 4.5", 0.01, 1.0, 3, 0.2, 0.05, 0.02, learned, ()
        ... )
        >>> found.step_size < found.largest
        True
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


@dataclasses.dataclass(frozen=True)
class IncentComplexity:
    """The rounds R_ε of Theorem 4.5 (ii) or 4.8 (ii).

    Args:
        theorem: The theorem that applies.
        rounds: R_ε, the least R for which part (i) gives the accuracy.
        step_size: γ = 1/√(R_ε H).
        terms: The terms of which R_ε is of the order of the largest. The theorem leaves out their
            constants, so the largest may be less or more than `rounds`.

    Example:
        >>> import fedsolve as fs
        >>> found = fs.theory.IncentComplexity("Theorem 4.8 (ii)", 900, 0.03, {"R_1": 100.0})
        >>> found.rounds
        900
    """

    theorem: str
    rounds: int
    step_size: float
    terms: Mapping[str, float]


def participation(game: Game, start: ArrayLike, step_size: float | None = None) -> Participation:
    """Compute the rate of Lemma 4.3 for a game and initial contributions.

    Args:
        game: A strongly monotone game.
        start: N̂_0, one number for each player.
        step_size: γ̃; by default μ_F/L_F², the largest that the lemma allows.

    Returns:
        The rate, with the initial distances that it reduces.

    Raises:
        InvalidInput: If the game is not strongly monotone, `step_size` is too large, or `start`
            does not hold one finite number for each player.

    Example:
        >>> import fedsolve as fs
        >>> cost = fs.games.LinearCost([0.5, 0.3])
        >>> game = fs.Game(None, cost, lower=[1, 1], upper=4, regularization=0.1)
        >>> found = fs.theory.participation(game, start=[2.0, 1.0])
        >>> round(found.rate, 3), found.distance, found.exact
        (0.5, 1.0, True)
    """
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
            f"step_size {step:g} is above μ_F/L_F² = {most:g}, the largest that Lemma 4.3 allows."
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
    start: ArrayLike,
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
    """Compute γ, γ̃ and the bounds of Theorem 4.5 or 4.8.

    With `gap`: Theorem 4.5 (smooth, not convex). With `distance` and `optimum_gradients`:
    Theorem 4.8 (convex).

    Args:
        game: A strongly monotone game.
        start: N̂_0, one number for each player.
        rounds: R.
        local_steps: H.
        smoothness: L, of every f_i.
        noise: ν, of stochastic gradients.
        dissimilarity: G and B.
        gap: f(x̄) − f* at round r̂, or a bound on it.
        distance: ‖x̄ − x*‖ at round r̂.
        optimum_gradients: Σ ‖∇f_i(x*)‖².
        game_step_size: γ̃; by default the largest that Lemma 4.3 allows.
        step_size: γ; by default 1/√(RH), as in the theorems' parts (ii), or the largest that is
            allowed where that is less.

    Returns:
        The step sizes, the bounds, and the assumptions that were not checked.

    Raises:
        InvalidInput: If not exactly one of `gap` and `distance` is given, a number is out of
            range, a step size is too large, or the rounds are too few for contributions to settle.

    Example:
        >>> import fedsolve as fs
        >>> cost = fs.games.LinearCost([0.5, 0.3])
        >>> game = fs.Game(None, cost, lower=[1, 1], upper=4, regularization=0.1)
        >>> found = fs.theory.incentfedavg(
        ...     game, [2.0, 1.0], rounds=1000, local_steps=2, smoothness=1.0, noise=0.1,
        ...     dissimilarity=(1.0, 2.0), gap=1.0,
        ... )
        >>> found.theorem, found.first, round(found.step_size, 4)
        ('Theorem 4.5', 4, 0.0143)
    """
    check_count("rounds", rounds)
    setting = _setting(
        game, start, local_steps, smoothness, noise, dissimilarity, gap, distance,
        optimum_gradients, game_step_size,
    )  # fmt: skip
    found = setting.at(rounds, None if step_size is None else float(step_size))
    check_positive("step_size", found.gamma)
    if found.gamma > found.largest * (1 + 1e-12):
        raise InvalidInput(
            f"step_size {found.gamma:g} is above {found.largest:.6g}, the largest allowed here."
        )
    learned = setting.learned
    return IncentGuarantee(
        theorem="Theorem 4.8" if setting.convex else "Theorem 4.5",
        step_size=found.gamma,
        game_step_size=learned.step_size,
        first=found.first,
        bound=found.bound,
        equilibrium_bound=found.settled * learned.distance**2,
        largest=found.largest,
        participation=learned,
        unchecked=_unchecked(setting.convex, found.first, local_steps, learned.exact),
    )


def incentfedavg_rounds(
    game: Game,
    start: ArrayLike,
    accuracy: float,
    *,
    local_steps: int,
    smoothness: float | int,
    noise: float | int,
    dissimilarity: tuple[float, float],
    gap: float | int | None = None,
    distance: float | int | None = None,
    optimum_gradients: float | int = 0.0,
    game_step_size: float | None = None,
) -> IncentComplexity:
    """Compute R_ε, the rounds of Theorem 4.5 (ii) or 4.8 (ii) for an accuracy ε.

    The theorems give the order of R_ε, as the largest of some terms. Here R_ε is also computed: the
    least R with γ = 1/√(RH) allowed and the bounds of part (i) at most ε. In Theorem 4.5 these are
    the bounds on E‖∇f(x̄)‖² and on E‖N̂_r − N*‖², with r̂ = R/2; in 4.8 that on E f(x̄_avg) − f*.

    Args:
        game: A strongly monotone game.
        start: N̂_0, one number for each player.
        accuracy: ε.
        local_steps: H.
        smoothness: L, of every f_i.
        noise: ν, of stochastic gradients.
        dissimilarity: G and B.
        gap: sup f − f*, or a bound on f(x̄) − f* at round r̂ (Theorem 4.5).
        distance: ‖x̄ − x*‖ at round r̂ (Theorem 4.8).
        optimum_gradients: Σ ‖∇f_i(x*)‖².
        game_step_size: γ̃; by default the largest that Lemma 4.3 allows.

    Returns:
        R_ε, the step size, and the terms of its order.

    Raises:
        InvalidInput: If not exactly one of `gap` and `distance` is given, or a number is out of
            range.

    Example:
        >>> import fedsolve as fs
        >>> cost = fs.games.LinearCost([0.5, 0.3])
        >>> game = fs.Game(None, cost, lower=[1, 1], upper=4, regularization=0.1)
        >>> found = fs.theory.incentfedavg_rounds(
        ...     game, [2.0, 1.0], 0.5, local_steps=2, smoothness=1.0, noise=0.1,
        ...     dissimilarity=(0.1, 2.0), gap=1.0,
        ... )
        >>> found.theorem, found.rounds, max(found.terms, key=found.terms.get)
        ('Theorem 4.5 (ii)', 2049, 'H(mBL)²')
    """
    check_positive("accuracy", accuracy)
    setting = _setting(
        game, start, local_steps, smoothness, noise, dissimilarity, gap, distance,
        optimum_gradients, game_step_size,
    )  # fmt: skip

    def enough(rounds: int) -> bool:
        try:
            found = setting.at(rounds, first=None if setting.convex else rounds // 2)
        except InvalidInput:  # too few for participation to settle
            return False
        settled = setting.convex or found.settled * setting.learned.distance**2 <= accuracy
        return found.chosen <= found.largest and found.bound <= accuracy and settled

    many = 1
    while not enough(many):
        many *= 2
        if many > 2**60:
            raise InvalidInput(f"No number of rounds up to 2^60 gives the accuracy {accuracy:g}.")
    few = many // 2
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return IncentComplexity(
        theorem="Theorem 4.8 (ii)" if setting.convex else "Theorem 4.5 (ii)",
        rounds=many,
        step_size=1 / math.sqrt(many * local_steps),
        terms=setting.terms(float(accuracy)),
    )


@dataclasses.dataclass(frozen=True)
class _Found:
    """Theorem 4.5 or 4.8 (i) for a number of rounds."""

    gamma: float
    chosen: float  # 1/√(RH)
    largest: float
    first: int
    bound: float
    settled: float


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What the theorems are about, whatever the number of rounds."""

    learned: Participation
    m: int
    H: int
    L: float
    nu: float
    G: float
    B: float
    gap: float | None
    distance: float | None
    optimum_gradients: float
    total: float  # ‖N*‖_1

    @property
    def convex(self) -> bool:
        """Whether it is about Theorem 4.8."""
        return self.distance is not None

    def at(self, rounds: int, step_size: float | None = None, first: int | None = None) -> _Found:
        """Return step sizes and bounds for this number of rounds; raise if they are too few."""
        constants = _Constants(
            m=self.m, H=self.H, R=rounds, L=self.L, nu=self.nu, G=self.G, B=self.B,
            rho=self.learned.rate, delta=self.learned.delta,
        )  # fmt: skip
        reach, limits = constants.convex_limits() if self.convex else constants.smooth_limits()
        least = constants.first_round(reach)
        if first is not None and first < least:
            raise InvalidInput(f"r̂ = {first} is before round {least}.")
        first = least if first is None else first
        largest, chosen = min(limits), 1 / math.sqrt(rounds * self.H)
        gamma = min(largest, chosen) if step_size is None else step_size
        if self.distance is not None:
            bound = constants.convex_bound(gamma, first, self.distance, self.optimum_gradients)
        else:
            bound = constants.smooth_bound(gamma, first, self.gap or 0.0)
        return _Found(gamma, chosen, largest, first, bound, constants.settled(first))

    def terms(self, eps: float) -> dict[str, float]:
        """Return the terms of which R_ε is of the order of the largest, as the paper has them."""
        m, H, L, nu, G, B = self.m, self.H, self.L, self.nu, self.G, self.B
        rho, delta = self.learned.rate, self.learned.delta
        spread = nu**2 + m * G**2
        if self.distance is not None:
            own = m * G**2 + self.optimum_gradients  # G² in print, see above
            return {
                "R_1": (self.distance**4 + nu**4) / (H * eps**2),
                "R_2": math.sqrt(L * spread / (H * eps)),
                "R_3": ((m * delta * G) ** 2 / ((1 - rho**2) * eps)) ** (2 / 3) / H ** (1 / 3),
                "R_4": delta**1.5 * own / ((1 - rho**1.5) * eps),
            }
        away = self.learned.distance * max(math.sqrt(192) * m * (m - 1) * G / self.total, 1)
        slow = math.log(1 / rho) if rho > 0 else math.inf
        start, late = away**2 / ((1 - rho**2) * L**2 * eps), 17 * (m * delta * B) ** 2
        squares = float(self.gap or 0.0) ** 2 + L**2 * nu**4 + (m * L**2 * H**2 * spread) ** 2
        return {
            "R_1": squares / (H * eps**2),
            "R_2": max(math.log(start) / slow, 0.0) if start > 0 else 0.0,
            "R_3": max(math.log(late) / slow, 0.0) if late > 0 else 0.0,
            "H(mBL)²": H * (m * B * L) ** 2,
            "L²/H": L**2 / H,
        }


def _setting(
    game: Game,
    start: ArrayLike,
    local_steps: int,
    smoothness: float | int,
    noise: float | int,
    dissimilarity: tuple[float, float],
    gap: float | int | None,
    distance: float | int | None,
    optimum_gradients: float | int,
    game_step_size: float | None,
) -> _Setting:
    """Check the arguments of the theorems, and compute Lemma 4.3's constants."""
    check_count("local_steps", local_steps)
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
    return _Setting(
        learned=participation(game, start, game_step_size),
        m=game.players,
        H=local_steps,
        L=float(smoothness),
        nu=float(noise),
        G=G,
        B=B,
        gap=None if gap is None else float(gap),
        distance=None if distance is None else float(distance),
        optimum_gradients=float(optimum_gradients),
        total=float(np.abs(game.equilibrium()).sum()),
    )


@dataclasses.dataclass(frozen=True)
class _Constants:
    """The constants of Theorems 4.5 and 4.8, by the paper's letters, and the theorems' formulas."""

    m: int
    H: int
    R: int
    L: float
    nu: float
    G: float
    B: float
    rho: float
    delta: float

    def smooth_limits(self) -> tuple[float, list[float]]:
        """Return the `reach` for r̂ (see `first_round`) and the upper limits on γ of Theorem 4.5."""
        m, H, L, B = self.m, self.H, self.L, self.B
        reach = math.sqrt(17) * m * self.delta * B
        limits = [1 / (32 * L), 1 / (math.sqrt(3) * H * L)]
        limits += [math.sqrt(2 / 153) / (m * B * H * L)] if B else []
        return reach, limits

    def convex_limits(self) -> tuple[float, list[float]]:
        """Return the `reach` for r̂ (see `first_round`) and the upper limits on γ of Theorem 4.8."""
        m, H, L, B, delta = self.m, self.H, self.L, self.B, self.delta
        reach = max(delta * (4 * m * L * B**2) ** (2 / 3), delta)
        limits = [1 / (16 * L), 1 / (2 * m * L), 1 / (math.sqrt(3) * H * L)]
        limits += [1 / (self.slow + 24 * L * H * B * math.sqrt(m))]
        limits += [1 / (16 * L * m**2 * B**2 * delta)] if delta else []
        return reach, limits

    @property
    def slow(self) -> float:
        """The coefficient of γ in the factor 1/(1 − γ `slow`) of Theorem 4.8."""
        return self.m * self.H * math.sqrt(self.delta) / (1 - math.sqrt(self.rho))

    def first_round(self, reach: float) -> int:
        """Return r̂, the first round with `reach` · ρ^r̂ ≤ 1; raise if it is not before the last."""
        first = max(0, math.ceil(math.log(reach) / math.log(1 / self.rho))) if reach > 0 else 0
        if first > self.R - 1:
            raise InvalidInput(
                f"{self.R} rounds are too few: participation has to settle first, and the bounds "
                f"hold only after round {first}."
            )
        return first

    def settled(self, first: int) -> float:
        """Return the mean of ρ^{2r} over the rounds from r̂ to R − 1."""
        rho, R = self.rho, self.R
        return (rho ** (2 * first) - rho ** (2 * R)) / ((1 - rho**2) * (R - first))

    def smooth_bound(self, gamma: float, first: int, gap: float) -> float:
        """Return the bound of Theorem 4.5 on E‖∇f(x̄)‖²."""
        m, H, L, nu, G, delta = self.m, self.H, self.L, self.nu, self.G, self.delta
        steps = (self.R - first) * H
        return (
            16 * gap / (gamma * steps)
            + 8 * L * gamma * nu**2
            + 76.5 * (nu**2 + m * G**2) * m * L**2 * H**2 * gamma**2
            + 16 * m**2 * delta**2 * G**2 * (1 + 2 * L * gamma) * self.settled(first)
        )

    def convex_bound(
        self, gamma: float, first: int, distance: float, optimum_gradients: float
    ) -> float:
        """Return the bound of Theorem 4.8 on E f(x̄_avg) − f*."""
        m, H, L, nu, G = self.m, self.H, self.L, self.nu, self.G
        rho, delta = self.rho, self.delta
        steps = (self.R - first) * H
        return (
            4 * distance**2 / (gamma * steps)
            + 72 * gamma**2 * L * (nu**2 + m * G**2) * H**2
            + 4 * gamma * nu**2
            + 16 * gamma * m**2 * delta**2 * G**2 * H / (steps * (1 - rho**2))
            + 4 * delta**1.5 * (m * G**2 + optimum_gradients) * H / (steps * (1 - rho**1.5))
        ) / (1 - self.slow * gamma)


def _unchecked(convex: bool, first: int, local_steps: int, exact: bool) -> tuple[str, ...]:
    """Return the assumptions of the theorem that nothing here checks."""
    unchecked = ["L, ν, G and B hold wherever the run goes."]
    if first > 0:
        what = "‖x̄ − x*‖" if convex else "f(x̄) − f*"
        unchecked.append(f"{what} after round r̂ = {first} is as given; it is known only then.")
    if local_steps > 1:
        unchecked.append(
            "Every step's gradient is unbiased, whatever was drawn before (Assumption 2.1): but a "
            "round's steps are on one subset of a client's samples."
        )
    if convex:
        unchecked.append("Every f_i is convex and has a minimiser.")
    if not exact:
        unchecked.append("μ_F and L_F are estimates.")
    return tuple(unchecked)


def convex_dissimilarity(
    weights: ArrayLike,
    smoothness: float | int,
    optimum: float | int,
    own_optima: ArrayLike,
) -> tuple[float, float]:
    """Compute G and B of Lemma 6.5, for convex f_i ≥ 0.

    Args:
        weights: p*, the clients' weights at the equilibrium.
        smoothness: L, of every f_i.
        optimum: f*.
        own_optima: f_i*, the least value of every f_i.

    Returns:
        G and B.

    Raises:
        InvalidInput: If the weights are not positive or do not add up to 1, their number differs
            from that of the optima, or one of the optima is negative.

    Example:
        >>> import fedsolve as fs
        >>> G, B = fs.theory.convex_dissimilarity([0.5, 0.5], 2.0, 0.4, [0.1, 0.3])
        >>> round(G, 4), B
        (0.8944, 1.0)
    """
    p, own = np.asarray(weights, float), np.asarray(own_optima, float)
    if p.shape != own.shape or p.ndim != 1 or (p <= 0).any() or not np.isclose(p.sum(), 1):
        raise InvalidInput("weights must be positive and add up to 1, one for each of own_optima.")
    if (own < 0).any():
        raise InvalidInput("Lemma 6.5 is for f_i ≥ 0; own_optima has a negative value.")
    spread = float(np.abs(1 / (len(p) * p) - 1).max())
    square = 2 * float(smoothness) * (float(optimum) - own.mean() + spread * float(optimum))
    return math.sqrt(max(square, 0.0)), math.sqrt(1 + spread)
