"""What players gain and pay: payoffs a(N), costs c(N) and payments, as parts of a `Game`.

A part has one method that matters, `alone(N, y)`: what player i gets if it plays y_i while all
others stay at N. Entry i depends on y_i only, so one reverse sweep through `alone` gives the own
partial derivatives of all m players, without the m × m Jacobian. A plain function of N is a part,
too (`Plain`); it is evaluated once for each player then, some players at a time.

Ready payoffs and costs are those of section 2 of "Incentive-Aware Federated Averaging with
Performance Guarantees under Strategic Participation"; payments are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar

AT_ONCE = 64  # players of a plain function that are evaluated together
Players = Float[Array, " m"]
Numbers = Any  # an array of numbers, once converted


def numbers(name: str, dimensions: int) -> Callable[[Any], Any]:
    """A converter for an array of finite numbers (left as it is when JAX maps over it)."""

    def convert(value: Any) -> Any:
        if isinstance(value, jax.Array):
            return value
        try:
            array = np.asarray(value, float)
        except (TypeError, ValueError):
            raise InvalidInput(f"{name} must be numbers, got {type(value).__name__}.") from None
        if array.ndim > dimensions:
            raise InvalidInput(f"{name} has shape {array.shape}: too many axes.")
        if not np.isfinite(array).all():
            raise InvalidInput(f"{name} has a value that is not finite.")
        return array

    return convert


class Part(eqx.Module):
    """A payoff, a cost or a payment: one number for each player."""

    def alone(self, N: Players, y: Players) -> Players:
        """Entry i is the value for player i at (y_i, N_−i)."""
        raise NotImplementedError

    def __call__(self, N: Players) -> Players:
        """The values for all players at N."""
        return self.alone(N, N)

    def slope(self, N: Players) -> Players:
        """∂_{N_i} of player i's value, for all i."""
        return jax.grad(lambda y: jnp.sum(self.alone(N, y)))(N)

    def own_slope(self, index: Any, N: Players) -> Float[Array, ""]:
        """The same for one player: what a client computes for itself."""
        return self.slope(N)[index]

    def slope_jacobian(self, N: Players) -> Float[Array, "m m"]:
        """∂_{N_j} of slope i. Row by row, some at a time."""
        columns = jnp.eye(N.size, dtype=N.dtype)
        return lax.map(lambda v: jax.jvp(self.slope, (N,), (v,))[1], columns, batch_size=AT_ONCE).T

    @property
    def players(self) -> int | None:
        """How many players it is for, if it says so."""
        return None

    @property
    def affine(self) -> bool:
        """Whether every slope is known to be an affine function of N. Of a user's function nothing
        is known."""
        return False


class Plain(Part):
    """A user's differentiable function N -> (m,)."""

    function: Callable[..., Any]

    def __call__(self, N: Players) -> Any:
        return self.function(N)

    def alone(self, N: Players, y: Players) -> Players:
        def one(own: tuple[Any, Any]) -> Float[Array, ""]:
            return self.function(N.at[own[0]].set(own[1]))[own[0]]

        return lax.map(one, (jnp.arange(N.size), y), batch_size=AT_ONCE)

    def slope(self, N: Players) -> Players:
        return lax.map(lambda i: self.own_slope(i, N), jnp.arange(N.size), batch_size=AT_ONCE)

    def own_slope(self, index: Any, N: Players) -> Float[Array, ""]:
        direction = jnp.zeros_like(N).at[index].set(1)
        return jax.jvp(self.function, (N,), (direction,))[1][index]

    def slope_jacobian(self, N: Players) -> Float[Array, "m m"]:
        def row(index: Any) -> Players:  # ∂_j ∂_i a_i for all j: one forward over one reverse sweep
            gradient = jax.grad(lambda point: self.function(point)[index])
            direction = jnp.zeros_like(N).at[index].set(1)
            return jax.jvp(gradient, (N,), (direction,))[1]

        return lax.map(row, jnp.arange(N.size), batch_size=AT_ONCE)


class Sum(Part):
    """Parts added up; of none, zero."""

    parts: tuple[Part, ...] = ()

    def alone(self, N: Players, y: Players) -> Players:
        return sum((part.alone(N, y) for part in self.parts), jnp.zeros_like(y))

    def __call__(self, N: Players) -> Players:
        return sum((part(N) for part in self.parts), jnp.zeros_like(N))

    def slope(self, N: Players) -> Players:
        return sum((part.slope(N) for part in self.parts), jnp.zeros_like(N))

    def own_slope(self, index: Any, N: Players) -> Float[Array, ""]:
        return sum((part.own_slope(index, N) for part in self.parts), jnp.zeros((), N.dtype))

    def slope_jacobian(self, N: Players) -> Float[Array, "m m"]:
        zero = jnp.zeros((N.size, N.size), N.dtype)
        return sum((part.slope_jacobian(N) for part in self.parts), zero)

    @property
    def affine(self) -> bool:
        return all(part.affine for part in self.parts)

    @property
    def players(self) -> int | None:
        return next((p.players for p in self.parts if p.players is not None), None)


# Payoffs


class _OfClasses(Part):
    """A payoff that follows from the players' class distributions."""

    distributions: Numbers = eqx.field(converter=numbers("distributions", 2))

    def __check_init__(self):
        Q = self.distributions
        if isinstance(Q, np.ndarray) and (
            Q.ndim != 2 or (Q < 0).any() or not np.allclose(Q.sum(axis=1), 1, atol=1e-4)
        ):
            raise InvalidInput(
                "distributions must be a matrix with one row for each player: its shares of the "
                "classes, from 0 to 1, that add up to 1."
            )

    @property
    def players(self) -> int:
        return self.distributions.shape[0]


class RandomDiscovery(_OfClasses):
    """a(N) = QQᵀN: player i gains q_ic whenever anyone samples class c."""

    def alone(self, N: Players, y: Players) -> Players:
        Q = self.distributions
        return Q @ (Q.T @ N) + jnp.sum(Q * Q, axis=1) * (y - N)

    def slope(self, N: Players) -> Players:
        return jnp.sum(self.distributions * self.distributions, axis=1).astype(N.dtype)

    @property
    def affine(self) -> bool:
        return True


class RandomCoverage(_OfClasses):
    """a_i(N) = 1 − ½ Σ_c q_ic Π_j (1 − q_jc)^{N_j}: each class is rewarded once.

    The product is formed as the exponential of a sum of logarithms, so that it is exact for N in
    the tens of thousands, where the factors are far below the smallest number. A class that is all
    that a player has (q_jc = 1) counts as a share just below 1: one sample then covers it.
    """

    def alone(self, N: Players, y: Players) -> Players:
        Q = jnp.asarray(self.distributions, N.dtype)
        logs = jnp.log1p(-jnp.minimum(Q, 1 - jnp.finfo(N.dtype).epsneg))
        missed = jnp.exp(logs.T @ N + logs * (y - N)[:, None])  # entry (i, c), i deviating
        return 1 - 0.5 * jnp.sum(Q * missed, axis=1)


# Costs


class LinearCost(Part):
    """c_i(N) = θ_i N_i, with θ_i (one number, or one for each player) as `rate`."""

    rate: Numbers = eqx.field(converter=numbers("rate", 1))

    def alone(self, N: Players, y: Players) -> Players:
        return self.rate * y

    def slope(self, N: Players) -> Players:
        return jnp.broadcast_to(jnp.asarray(self.rate, N.dtype), N.shape)

    @property
    def affine(self) -> bool:
        return True

    @property
    def players(self) -> int | None:
        return _length(self.rate)


class PrivacyCost(Part):
    """c_i(N) = θ_i N_i − κ_i log(1 − N_i / A_i): a linear part, and a privacy term that grows
    without bound as a player reveals all its A_i samples (`available`, above the upper bound)."""

    rate: Numbers = eqx.field(converter=numbers("rate", 1))
    privacy: Numbers = eqx.field(converter=numbers("privacy", 1))
    available: Numbers = eqx.field(converter=numbers("available", 1))

    def alone(self, N: Players, y: Players) -> Players:
        return self.rate * y - self.privacy * jnp.log1p(-y / self.available)

    def slope(self, N: Players) -> Players:
        return self.rate + self.privacy / (self.available - N)

    @property
    def players(self) -> int | None:
        lengths = (_length(x) for x in (self.rate, self.privacy, self.available))
        return next((length for length in lengths if length is not None), None)


class QuadraticCost(Part):
    """The cost whose own partial derivatives are affine, F(N) = A N + b:
    c_i(N) = N_i ((A N)_i + b_i) − ½ A_ii N_i²."""

    matrix: Numbers = eqx.field(converter=numbers("matrix", 2))
    rate: Numbers = eqx.field(converter=numbers("rate", 1))

    def __check_init__(self):
        if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
            raise InvalidInput(f"matrix must be square, got shape {self.matrix.shape}.")

    def alone(self, N: Players, y: Players) -> Players:
        own = jnp.diagonal(self.matrix)
        return y * (self.matrix @ N - own * N + self.rate) + 0.5 * own * y * y

    def slope(self, N: Players) -> Players:
        return self.matrix @ N + self.rate

    def slope_jacobian(self, N: Players) -> Float[Array, "m m"]:
        return jnp.asarray(self.matrix, N.dtype)

    @property
    def affine(self) -> bool:
        return True

    @property
    def players(self) -> int:
        return self.matrix.shape[0]


# Payments


class PricePerSample(Part):
    """Pays player i the price π_i for every sample (one price, or one for each player)."""

    price: Numbers = eqx.field(converter=numbers("price", 1))

    def alone(self, N: Players, y: Players) -> Players:
        return self.price * y

    @property
    def affine(self) -> bool:
        return True

    @property
    def players(self) -> int | None:
        return _length(self.price)


class SharedBudget(Part):
    """Shares a budget in proportion to what players contribute: B N_i / Σ_j N_j."""

    budget: Scalar = eqx.field(converter=scalar("budget"))

    def __check_init__(self):
        check_positive("budget", self.budget, zero=True)

    def alone(self, N: Players, y: Players) -> Players:
        total = jnp.sum(N) - N + y
        return y * (self.budget / jnp.where(total > 0, total, 1))


def class_distributions(
    labels: Sequence[Any], classes: int | None = None
) -> Float[np.ndarray, "m t"]:
    """Q: row i holds the share of each class among client i's labels (whole numbers from 0)."""
    clients = [np.asarray(each).astype(np.int64).ravel() for each in labels]
    if not clients or not all(map(len, clients)):
        raise InvalidInput("Every client needs at least one label.")
    if min(each.min() for each in clients) < 0:
        raise InvalidInput("Labels must be whole numbers from 0 up.")
    most = int(max(each.max() for each in clients)) + 1
    if classes is not None and classes < most:
        raise InvalidInput(f"There is a label {most - 1}, but only {classes} classes.")
    counts = [np.bincount(each, minlength=classes or most) for each in clients]
    return np.stack([count / count.sum() for count in counts])


def as_part(name: str, given: Any) -> Part:
    """What a user gave as payoff or cost."""
    if given is None:
        return Sum()
    if isinstance(given, Part):
        return given
    if callable(given):
        return Plain(given)
    raise InvalidInput(f"{name} must be a function of N, or a part such as LinearCost: {given!r}.")


def _length(values: Numbers) -> int | None:
    return values.shape[0] if values.ndim else None
