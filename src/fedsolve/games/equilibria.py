"""Nash equilibria and monotonicity constants of games, in double precision, on the host.

N* is the zero of the natural residual Φ(N) = N − Π[N − F(N)/s] for any positive scales s, since the
strategy sets are intervals. Newton's method on Φ (semismooth: each player is either at a bound or
free) solves for all free players at once; where a step does not reduce Φ, extragradient steps,
which converge for every monotone game, are taken instead. Nothing here is shared with
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import lax
from jaxtyping import Array, Bool, Float

from fedsolve.errors import InvalidInput
from fedsolve.games.game import PROBES, Game, Monotonicity, Profile, in_double
from fedsolve.games.parts import Index, Players

NEWTON_STEPS = 60
EXTRAGRADIENT_STEPS = 200
ROUNDING = 1e-9  # relative size below which differences of Jacobians and eigenvalues are zero

Matrix = Float[np.ndarray, "m m"]

_pseudogradient = eqx.filter_jit(Game.pseudogradient)
_jacobian = eqx.filter_jit(Game.jacobian)


def monotonicity(game: Game, probes: int, seed: int = 0) -> Monotonicity:
    """Return μ_F, the least eigenvalue of the symmetrised Jacobian, and L_F, its norm."""
    found = [_constants(jacobian) for jacobian in _jacobians(game, probes, seed)]
    strong, lipschitz = min(f[0] for f in found), max(f[1] for f in found)
    return Monotonicity(strong, lipschitz, exact=game.affine, probes=1 if game.affine else probes)


def _jacobians(game: Game, probes: int, seed: int = 0) -> Iterator[Matrix]:
    """Yield the Jacobians at points of the box, without repetitions; one for an affine game."""
    with jax.enable_x64(True):
        placed, known = in_double(game), np.full((1, 1), np.inf)
        for point in _probes(game, 1 if game.affine else probes, seed):
            jacobian = np.asarray(_jacobian(placed, jnp.asarray(point)))
            if not np.abs(jacobian - known).max() <= ROUNDING * np.abs(jacobian).max():
                yield jacobian
            known = jacobian


def _constants(jacobian: Matrix) -> tuple[float, float]:
    """Return the least eigenvalue of the symmetric part, and the greatest singular value."""
    size = max(float(np.abs(jacobian).max()), 1e-300)
    unit, last = jacobian / size, len(jacobian) - 1  # LAPACK fails on numbers near the smallest
    least = scipy.linalg.eigvalsh(unit + unit.T, subset_by_index=[0, 0])[0]
    greatest = scipy.linalg.eigvalsh(unit @ unit.T, subset_by_index=[last, last])[0]
    return 0.5 * size * float(least), size * float(np.sqrt(max(greatest, 0.0)))


def solve_equilibrium(game: Game, tolerance: float, monotone: bool) -> Profile:
    """Return N*, or raise if none was found."""
    if monotone:
        _check_monotone(game)
    lower, upper = np.asarray(game.lower, float), np.asarray(game.upper, float)
    with jax.enable_x64(True):
        placed = in_double(game)
        for start in (0.5 * (lower + upper), lower, lower + 0.01 * (upper - lower)):
            N = _newton(placed, start, lower, upper, tolerance)
            if N is not None:
                return N
    raise InvalidInput(
        f"No equilibrium was found in {NEWTON_STEPS} Newton steps from each of three starts. "
        "A larger regularization makes it easier."
    )


def _newton(
    placed: Game, start: Profile, lower: Profile, upper: Profile, tolerance: float
) -> Profile | None:
    """Return the zero of Φ that Newton's method finds from a start, None if it finds none."""

    def slopes(N: Profile) -> Profile:
        return np.asarray(_pseudogradient(placed, jnp.asarray(N)))

    def residual(N: Profile, F: Profile, scales: Profile) -> Profile:
        return N - np.clip(N - F / scales, lower, upper)

    N, F = start, slopes(start)
    for _ in range(NEWTON_STEPS):
        J = np.asarray(_jacobian(placed, jnp.asarray(N)))
        scales = _scales(F, J, upper - lower)
        here = residual(N, F, scales)
        if np.abs(here).max() <= tolerance * max(1.0, np.abs(N).max()):
            return N
        step, length = _newton_step(N, F, J, scales, lower, upper), 1.0
        while length > 1e-3:
            trial = np.clip(N + length * step, lower, upper)
            F = slopes(trial)
            there = residual(trial, F, scales)
            if np.linalg.norm(there) <= (1 - 0.1 * length) * np.linalg.norm(here):
                break
            length /= 2
        else:
            trial = np.asarray(_extragradient(placed, jnp.asarray(N), jnp.asarray(scales)))
            F = slopes(trial)
        N = trial
    return None


def _scales(F: Profile, J: Matrix, width: Profile) -> Profile:
    """Return each player's curvature: with it, Φ_i is the distance from its best response."""
    flat = 1e-6 * (np.abs(F).max() + 1e-300) / max(width.max(), 1.0)
    return np.maximum(np.maximum(np.abs(np.diagonal(J)), 0.01 * np.abs(J).max(axis=1)), flat)


def _probes(game: Game, count: int, seed: int) -> Float[np.ndarray, "probes m"]:
    """Return points of the box: the lowest, the highest and the middle one, then random ones.

    Every second random one is near the lower bounds, where payoffs with diminishing returns are
    curved.
    """
    rng, m = np.random.default_rng(seed), game.players
    drawn = rng.uniform(size=(max(count - 3, 0), m))
    drawn[1::2] *= np.geomspace(1e-4, 0.1, len(drawn[1::2]))[:, None]
    share = np.concatenate([np.zeros((1, m)), np.ones((1, m)), np.full((1, m), 0.5), drawn])
    lower, upper = np.asarray(game.lower), np.asarray(game.upper)
    return lower + share[:count] * (upper - lower)


def _newton_step(
    N: Profile, F: Profile, J: Matrix, scales: Profile, lower: Profile, upper: Profile
) -> Profile:
    """Move players whose best response is at a bound to it, and solve F = 0 for the others."""
    aim = N - F / scales
    free = (aim > lower) & (aim < upper)
    step = np.clip(aim, lower, upper) - N
    system = J[np.ix_(free, free)] + np.diag(1e-14 * scales[free])
    wanted = -F[free] - J[np.ix_(free, ~free)] @ step[~free]
    try:
        step[free] = np.linalg.solve(system, wanted)
    except np.linalg.LinAlgError:
        step[free] = np.linalg.lstsq(system, wanted, rcond=None)[0]
    return step


@eqx.filter_jit
def _extragradient(game: Game, N: Players, scales: Players) -> Players:
    """Iterate N ← Π[N − tF(Π[N − tF(N)])], with t found by halving (Khobotov's rule)."""

    def move(N: Players, F: Players, t: Float[Array, ""]) -> Players:
        return game.project(N - t * F / scales)

    def step(
        index: Index, carry: tuple[Players, Float[Array, ""]]
    ) -> tuple[Players, Float[Array, ""]]:
        N, t = carry
        F = game.pseudogradient(N)

        def too_long(t: Float[Array, ""]) -> Bool[Array, ""]:
            y = move(N, F, t)
            gap = jnp.linalg.norm((game.pseudogradient(y) - F) / jnp.sqrt(scales))
            return (t * gap > 0.9 * jnp.linalg.norm((y - N) * jnp.sqrt(scales))) & (t > 1e-12)

        t = lax.while_loop(too_long, lambda t: 0.5 * t, t)
        return move(N, game.pseudogradient(move(N, F, t)), t), 1.5 * t

    return lax.fori_loop(0, EXTRAGRADIENT_STEPS, step, (N, jnp.ones((), N.dtype)))[0]


def _check_monotone(game: Game) -> None:
    """Raise if the game is not monotone at some point, with the regularization that would help."""
    for jacobian in _jacobians(game, PROBES):
        size = max(float(np.abs(jacobian).max()), 1e-300)
        try:  # a Cholesky factor is much cheaper than the least eigenvalue
            shift = ROUNDING * size * len(jacobian) * np.eye(len(jacobian))
            scipy.linalg.cholesky(0.5 * (jacobian + jacobian.T) + shift, check_finite=False)
        except np.linalg.LinAlgError:
            break
    else:
        return
    found = game.monotonicity()
    more = float(game.regularization) - found.strong
    raise InvalidInput(
        "The game is not monotone: its symmetrised Jacobian has the eigenvalue "
        f"{found.strong:.3g}, so an equilibrium need not exist, be unique or be learned. "
        f"A regularization of {more:.3g} or more would make it monotone"
        f"{'' if found.exact else ' (an estimate)'}; monotone=False tries to find one anyway."
    )
