"""Payoffs from the model's accuracy, by a learning curve that is fitted to noisy measurements.

    accuracy(n) = top − gap · (1 + n/scale)^(−rate),   n = Σ_j N_j

which is increasing and concave in n.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.games.parts import Numbers, Part, Players, _length, numbers
from fedsolve.types import ArrayLike

LEAST_POINTS = 4  # as many as the curve has parameters


class LearningCurve(eqx.Module):
    """The accuracy of a model by the number n of samples, top − gap·(1 + n/scale)^(−rate).

    Args:
        top: The accuracy with any number of samples.
        gap: How far the accuracy without samples is below it, at least 0.
        scale: The number of samples at which the curve bends, positive.
        rate: The exponent, positive.

    Raises:
        InvalidInput: If a number is out of range.

    Example:
        >>> import fedsolve as fs
        >>> curve = fs.games.LearningCurve(top=0.9, gap=0.8, scale=100.0, rate=1.0)
        >>> round(float(curve(100.0)), 3)
        0.5
    """

    top: Scalar = eqx.field(converter=scalar("top"))
    gap: Scalar = eqx.field(converter=scalar("gap"))
    scale: Scalar = eqx.field(converter=scalar("scale"), default=1.0)
    rate: Scalar = eqx.field(converter=scalar("rate"), default=0.5)

    def __check_init__(self):
        check_positive("gap", self.gap, zero=True)
        check_positive("scale", self.scale)
        check_positive("rate", self.rate)

    def __call__(self, n: Numbers | float | int) -> Float[Array, "..."]:
        """Compute the accuracy with n samples, one number or several."""
        n = jnp.asarray(n, jnp.result_type(float))
        return jnp.asarray(self.top - self.gap * (1 + n / self.scale) ** (-self.rate))


@dataclasses.dataclass(frozen=True)
class FittedCurve:
    """A learning curve, and how well the measurements determine it.

    Args:
        curve: The curve.
        samples: Where the accuracy was measured.
        error: The standard error of the curve at these points.
        misfit: χ² for each degree of freedom: near 1 where the curve fits within the noise. NaN
            without degrees of freedom.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> n = np.array([10, 30, 100, 300, 1000])
        >>> noise = np.random.default_rng(0).normal(0, 0.001, (5, 8))
        >>> curve = fs.games.LearningCurve(top=0.9, gap=0.8, scale=20.0, rate=0.7)
        >>> found = fs.games.fit_learning_curve(n, np.asarray(curve(n))[:, None] + noise)
        >>> bool(np.all(np.abs(np.asarray(found.curve(n) - curve(n))) < 0.002))
        True
    """

    curve: LearningCurve
    samples: Float[np.ndarray, " k"]
    error: Float[np.ndarray, " k"]
    misfit: float


def fit_learning_curve(samples: ArrayLike, accuracy: ArrayLike) -> FittedCurve:
    """Fit a learning curve to measured accuracies, by weighted least squares.

    Args:
        samples: The numbers of samples at which models were trained, at least four.
        accuracy: The accuracies, with one row for each number of samples and one column for each
            repetition (another seed, another subset), at least two, whose spread is the noise.

    Returns:
        The curve, its standard error at the points, and its misfit.

    Raises:
        InvalidInput: If there are too few points or repetitions, or a number is not finite.

    Example:
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> n, exact = [10, 20, 40, 80], np.array([[0.5], [0.6], [0.66], [0.7]])
        >>> found = fs.games.fit_learning_curve(n, exact + [-0.01, 0.01])
        >>> bool(abs(float(found.curve(20)) - 0.6) < 0.01)
        True
    """
    import scipy.optimize

    n, measured = np.asarray(samples, float), np.asarray(accuracy, float)
    if n.ndim != 1 or len(np.unique(n)) < LEAST_POINTS or (n < 0).any():
        raise InvalidInput(
            f"samples must be at least {LEAST_POINTS} different numbers, none below 0."
        )
    if measured.ndim != 2 or len(measured) != len(n) or measured.shape[1] < 2:
        raise InvalidInput(
            f"accuracy must have a row for each of {len(n)} numbers of samples and a column for "
            f"each of at least two repetitions, got shape {measured.shape}."
        )
    if not (np.isfinite(n).all() and np.isfinite(measured).all()):
        raise InvalidInput("samples and accuracy must be finite.")
    repeats = measured.shape[1]
    mean = measured.mean(axis=1)
    pooled = np.sqrt(measured.var(axis=1, ddof=1).mean())  # one noise for all: few repetitions
    noise = max(pooled, 1e-6) / np.sqrt(repeats)

    def curve(p: np.ndarray) -> np.ndarray:
        top, gap, scale, rate = p[0], np.exp(p[1]), np.exp(p[2]), np.exp(p[3])
        return top - gap * (1 + n / scale) ** (-rate)

    def residual(p: np.ndarray) -> np.ndarray:
        return (curve(p) - mean) / noise

    spread = max(np.ptp(mean), 1e-3)
    best = None
    for scale in np.geomspace(max(n.min(), 1.0), max(n.max(), 2.0), 4):
        for rate in (0.3, 1.0):
            start = np.array([mean.max(), np.log(spread), np.log(scale), np.log(rate)])
            limits = np.log(spread) + 7, np.log(max(n.max(), 1.0)) + 5, np.log(20.0)
            low = np.array([-np.inf, start[1] - 20, -7, np.log(0.02)])
            high = np.array([np.inf, *limits])
            found = scipy.optimize.least_squares(residual, start, bounds=(low, high))
            if best is None or found.cost < best.cost:
                best = found
    assert best is not None
    jacobian = best.jac * noise  # of the curve
    covariance = np.linalg.pinv(best.jac.T @ best.jac)
    error = np.sqrt(np.einsum("kp,pq,kq->k", jacobian, covariance, jacobian))
    freedom = len(n) - LEAST_POINTS
    misfit = 2 * best.cost / freedom if freedom else float("nan")
    top, gap, scale, rate = best.x[0], *np.exp(best.x[1:])
    fitted = LearningCurve(float(top), float(gap), float(scale), float(rate))
    return FittedCurve(fitted, n, error, float(misfit))


def _curve(value: object) -> Callable[..., Any]:
    """Return a function of the number of samples, or raise."""
    if not callable(value):
        raise InvalidInput(
            f"curve must be a LearningCurve or a function of a number, got {value!r}."
        )
    return value


class _CurvePayoff(Part):
    """A payoff that depends on a learning curve."""

    curve: Callable[..., Any] = eqx.field(converter=lambda value: _curve(value))
    reward: Numbers = eqx.field(converter=numbers("reward", 1), default=1.0)

    @property
    def players(self) -> int | None:
        return _length(self.reward)


class AccuracyPayoff(_CurvePayoff):
    """The payoff reward_i · accuracy(Σ_j N_j): all players use the one model.

    Args:
        curve: The accuracy by the number of samples, a `LearningCurve` or a function of a number.
        reward: What a player gains from an accuracy of 1; one number for all or one for each.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> curve = fs.games.LearningCurve(top=0.9, gap=0.8, scale=100.0, rate=1.0)
        >>> payoff = fs.games.AccuracyPayoff(curve, reward=[10.0, 20.0])
        >>> payoff(jnp.array([60.0, 40.0])).round(3).tolist()
        [5.0, 10.0]
    """

    def alone(self, N: Players, y: Players) -> Players:
        return self.reward * self.curve(jnp.sum(N) - N + y)


class LeaveOneOutPayoff(_CurvePayoff):
    """The payoff reward_i · (accuracy(Σ_j N_j) − accuracy(Σ_{j≠i} N_j)).

    Args:
        curve: The accuracy by the number of samples, a `LearningCurve` or a function of a number.
        reward: What a player is paid for an accuracy of 1; one number for all or one for each.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> payoff = fs.games.LeaveOneOutPayoff(lambda n: n**2, reward=1.0)
        >>> payoff(jnp.array([1.0, 2.0])).tolist()
        [5.0, 8.0]
    """

    def alone(self, N: Players, y: Players) -> Players:
        others = jnp.sum(N) - N
        return self.reward * (self.curve(others + y) - self.curve(others))


class ShapleyPayoff(_CurvePayoff):
    """The payoff reward_i · φ_i(N), with Shapley's value φ of the accuracy.

    The value of a coalition is the accuracy with its samples, accuracy(Σ_{j in S} N_j). The mean
    over all orders of the players is estimated from `orders` of them, drawn once in pairs of an
    order and its reverse. The payoffs with a reward of 1 add up to accuracy(ΣN) − accuracy(0).

    Args:
        curve: The accuracy by the number of samples, a `LearningCurve` or a function of a number.
        reward: What is paid for an accuracy of 1; one number for all or one for each.
        orders: The number of orders, even.
        seed: The seed of the orders.

    Raises:
        InvalidInput: If `orders` is not a positive even number.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> payoff = fs.games.ShapleyPayoff(lambda n: n**2, reward=1.0)
        >>> payoff(jnp.array([1.0, 2.0])).tolist()
        [3.0, 6.0]
    """

    orders: int = eqx.field(static=True, default=256)
    seed: int = eqx.field(static=True, default=0)

    def __check_init__(self):
        if not isinstance(self.orders, int) or self.orders < 2 or self.orders % 2:
            raise InvalidInput(f"orders must be a positive even number, got {self.orders}.")

    def alone(self, N: Players, y: Players) -> Players:
        rng = np.random.default_rng(self.seed)
        half = [rng.permutation(N.size) for _ in range(self.orders // 2)]
        orders = np.stack([*half, *(order[::-1] for order in half)])
        places = np.argsort(orders, axis=1)  # of each player in each order

        def one(order: Int[Array, " m"], place: Int[Array, " m"]) -> Players:
            own = N[order]
            before = (jnp.cumsum(own) - own)[place]
            return self.curve(before + y) - self.curve(before)

        each = jax.vmap(one)(jnp.asarray(orders), jnp.asarray(places))
        return jnp.asarray(self.reward) * jnp.mean(each, axis=0)
