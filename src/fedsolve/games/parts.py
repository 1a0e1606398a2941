"""Payoffs a(N), costs c(N) and payments: the parts that a `Game` is made of.

The main method of a part is `alone(N, y)`: the value for player i if it plays y_i while all others
stay at N. Entry i depends on y_i only, so one reverse sweep through `alone` gives the own partial
derivatives of all m players, without the m × m Jacobian. A plain function of N is a part, too
(`Plain`), but is evaluated once for each player, in blocks of players.

The payoffs and costs are those of section 2 of "Incentive-Aware Federated Averaging with
Performance Guarantees under Strategic Participation"; the payments are not from the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.types import ArrayLike

BLOCK_SIZE = 64  # players of a plain function that are evaluated together
Players = Float[Array, " m"]  # a number for each player
Numbers = Shaped[Array, "..."] | Shaped[np.ndarray, "..."]  # a field, after its converter
Index = Int[Array, ""] | int  # of a player


def numbers(name: str, dimensions: int) -> Callable[[object], Numbers]:
    """Return a converter for an array of finite numbers; it keeps JAX arrays as they are."""

    def convert(value: object) -> Numbers:
        if isinstance(value, jax.Array):
            return value
        try:
            array = np.asarray(value, float)
        except (TypeError, ValueError):
            raise InvalidInput(f"{name} must be numbers, got {type(value).__name__}.") from None
        if array.ndim > dimensions:
            raise InvalidInput(f"{name} has too many axes: its shape is {array.shape}.")
        if not np.isfinite(array).all():
            raise InvalidInput(f"{name} has a value that is not finite.")
        return array

    return convert


class Part(eqx.Module):
    """A payoff, a cost or a payment: one number for each player.

    A subclass implements `alone`. It may override the derivatives where they have a closed form,
    `players` where it is for a fixed number of players, and `affine`.
    """

    def alone(self, N: Players, y: Players) -> Players:
        """Evaluate every player's deviation from N by itself.

        Args:
            N: The contributions of all players.
            y: The contribution that each player would make in place of its own.

        Returns:
            For every player i, its value at (y_i, N_−i).
        """
        raise NotImplementedError

    def __call__(self, N: Players) -> Players:
        """Return the values of all players at N."""
        return self.alone(N, N)

    def slope(self, N: Players) -> Players:
        """Return the own partial derivatives of all players.

        Args:
            N: The contributions of all players.

        Returns:
            ∂_{N_i} of player i's value, for all i.
        """
        return jax.grad(lambda y: jnp.sum(self.alone(N, y)))(N)

    def own_slope(self, index: Index, N: Players) -> Float[Array, ""]:
        """Return the own partial derivative of one player, as a client computes it.

        Args:
            index: The player, i.
            N: The contributions of all players.

        Returns:
            ∂_{N_i} of player i's value.
        """
        return self.slope(N)[index]

    def slope_jacobian(self, N: Players) -> Float[Array, "m m"]:
        """Return the Jacobian of `slope`, computed in blocks of rows.

        Args:
            N: The contributions of all players.

        Returns:
            ∂_{N_j} of slope i, in row i and column j.
        """
        columns = jnp.eye(N.size, dtype=N.dtype)
        derivatives = lax.map(
            lambda v: jax.jvp(self.slope, (N,), (v,))[1], columns, batch_size=BLOCK_SIZE
        )
        return derivatives.T

    @property
    def players(self) -> int | None:
        """The number of players, None where the part is for any number."""
        return None

    @property
    def affine(self) -> bool:
        """Whether every slope is known to be affine in N; False for a user's function."""
        return False


class Plain(Part):
    """A user's differentiable function N -> (m,)."""

    function: Callable

    def __call__(self, N: Players) -> Array:
        return self.function(N)

    def alone(self, N: Players, y: Players) -> Players:
        def one(own: tuple[Int[Array, ""], Float[Array, ""]]) -> Float[Array, ""]:
            return self.function(N.at[own[0]].set(own[1]))[own[0]]

        return lax.map(one, (jnp.arange(N.size), y), batch_size=BLOCK_SIZE)

    def slope(self, N: Players) -> Players:
        return lax.map(lambda i: self.own_slope(i, N), jnp.arange(N.size), batch_size=BLOCK_SIZE)

    def own_slope(self, index: Index, N: Players) -> Float[Array, ""]:
        direction = jnp.zeros_like(N).at[index].set(1)
        return jax.jvp(self.function, (N,), (direction,))[1][index]

    def slope_jacobian(self, N: Players) -> Float[Array, "m m"]:
        # ∂_j ∂_i a_i for all j: one forward over one reverse sweep
        def row(index: Int[Array, ""]) -> Players:
            gradient = jax.grad(lambda point: self.function(point)[index])
            direction = jnp.zeros_like(N).at[index].set(1)
            return jax.jvp(gradient, (N,), (direction,))[1]

        return lax.map(row, jnp.arange(N.size), batch_size=BLOCK_SIZE)


class Sum(Part):
    """A sum of parts; zero without any."""

    parts: tuple[Part, ...] = ()

    def alone(self, N: Players, y: Players) -> Players:
        return sum((part.alone(N, y) for part in self.parts), jnp.zeros_like(y))

    def __call__(self, N: Players) -> Players:
        return sum((part(N) for part in self.parts), jnp.zeros_like(N))

    def slope(self, N: Players) -> Players:
        return sum((part.slope(N) for part in self.parts), jnp.zeros_like(N))

    def own_slope(self, index: Index, N: Players) -> Float[Array, ""]:
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


class _ClassPayoff(Part):
    """A payoff that depends on the players' class distributions."""

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


class RandomDiscovery(_ClassPayoff):
    """The payoff a(N) = QQᵀN: player i gains q_ic whenever a player samples class c.

    Args:
        distributions: Q, with one row for each player: its shares of the classes
            (`class_distributions` computes them from labels).

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> payoff = fs.games.RandomDiscovery([[0.5, 0.5], [1.0, 0.0]])
        >>> payoff(jnp.array([2.0, 4.0])).tolist()
        [3.0, 5.0]
    """

    def alone(self, N: Players, y: Players) -> Players:
        Q = jnp.asarray(self.distributions)
        return Q @ (Q.T @ N) + jnp.sum(Q * Q, axis=1) * (y - N)

    def slope(self, N: Players) -> Players:
        return jnp.sum(self.distributions * self.distributions, axis=1).astype(N.dtype)

    @property
    def affine(self) -> bool:
        return True


class RandomCoverage(_ClassPayoff):
    """The payoff a_i(N) = 1 − ½ Σ_c q_ic Π_j (1 − q_jc)^{N_j}: each class is rewarded once.

    The product is computed as the exponential of a sum of logarithms, so that it is exact for N in
    the tens of thousands, where the factors are far below the smallest number. A share q_jc = 1 is
    replaced by the next smaller number, so that one sample covers the class.

    Args:
        distributions: Q, with one row for each player: its shares of the classes
            (`class_distributions` computes them from labels).

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> payoff = fs.games.RandomCoverage([[0.5, 0.5], [0.5, 0.5]])
        >>> payoff(jnp.array([1.0, 1.0])).tolist()
        [0.875, 0.875]
    """

    def alone(self, N: Players, y: Players) -> Players:
        Q = jnp.asarray(self.distributions, N.dtype)
        logs = jnp.log1p(-jnp.minimum(Q, 1 - jnp.finfo(N.dtype).epsneg))
        missed = jnp.exp(logs.T @ N + logs * (y - N)[:, None])  # entry (i, c), i deviating
        return 1 - 0.5 * jnp.sum(Q * missed, axis=1)


# Costs


class LinearCost(Part):
    """The cost c_i(N) = θ_i N_i.

    Args:
        rate: θ, one number for all players or one for each.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> cost = fs.games.LinearCost([0.5, 0.25])
        >>> cost(jnp.array([2.0, 4.0])).tolist()
        [1.0, 1.0]
    """

    rate: Numbers = eqx.field(converter=numbers("rate", 1))

    def alone(self, N: Players, y: Players) -> Players:
        return y * self.rate

    def slope(self, N: Players) -> Players:
        return jnp.broadcast_to(jnp.asarray(self.rate, N.dtype), N.shape)

    @property
    def affine(self) -> bool:
        return True

    @property
    def players(self) -> int | None:
        return _length(self.rate)


class PrivacyCost(Part):
    """The cost c_i(N) = θ_i N_i − κ_i log(1 − N_i / A_i).

    The privacy term grows without bound as a player reveals all of its A_i samples. Every argument
    is one number for all players or one for each.

    Args:
        rate: θ.
        privacy: κ.
        available: A, above the upper bound of every player.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> cost = fs.games.PrivacyCost(rate=0.5, privacy=0.0, available=[10.0, 20.0])
        >>> cost(jnp.array([2.0, 4.0])).tolist()
        [1.0, 2.0]
    """

    rate: Numbers = eqx.field(converter=numbers("rate", 1))
    privacy: Numbers = eqx.field(converter=numbers("privacy", 1))
    available: Numbers = eqx.field(converter=numbers("available", 1))

    def alone(self, N: Players, y: Players) -> Players:
        return y * self.rate - self.privacy * jnp.log1p(-y / self.available)

    def slope(self, N: Players) -> Players:
        return jnp.asarray(self.rate) + jnp.asarray(self.privacy) / (self.available - N)

    @property
    def players(self) -> int | None:
        lengths = (_length(x) for x in (self.rate, self.privacy, self.available))
        return next((length for length in lengths if length is not None), None)


class QuadraticCost(Part):
    """The cost c_i(N) = N_i ((A N)_i + b_i) − ½ A_ii N_i².

    Its own partial derivatives are affine, F(N) = A N + b.

    Args:
        matrix: A, square, with one row for each player.
        rate: b, one number for all players or one for each.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> cost = fs.games.QuadraticCost([[1.0, 0.0], [2.0, 1.0]], rate=-1.0)
        >>> cost.slope(jnp.array([1.0, 1.0])).tolist()
        [0.0, 2.0]
    """

    matrix: Numbers = eqx.field(converter=numbers("matrix", 2))
    rate: Numbers = eqx.field(converter=numbers("rate", 1))

    def __check_init__(self):
        if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
            raise InvalidInput(f"matrix must be square, got shape {self.matrix.shape}.")

    def alone(self, N: Players, y: Players) -> Players:
        matrix = jnp.asarray(self.matrix)
        own = jnp.diagonal(matrix)
        return y * (matrix @ N - own * N + self.rate) + 0.5 * own * y * y

    def slope(self, N: Players) -> Players:
        return jnp.asarray(self.matrix) @ N + self.rate

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
    """The payment π_i N_i: a price for every sample.

    Args:
        price: π, one number for all players or one for each.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> payment = fs.games.PricePerSample(0.5)
        >>> payment(jnp.array([2.0, 4.0])).tolist()
        [1.0, 2.0]
    """

    price: Numbers = eqx.field(converter=numbers("price", 1))

    def alone(self, N: Players, y: Players) -> Players:
        return y * self.price

    @property
    def affine(self) -> bool:
        return True

    @property
    def players(self) -> int | None:
        return _length(self.price)


class SharedBudget(Part):
    """The payment B N_i / Σ_j N_j: a budget shared in proportion to contributions.

    Args:
        budget: B, at least 0.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedsolve as fs
        >>> payment = fs.games.SharedBudget(3.0)
        >>> payment(jnp.array([2.0, 4.0])).tolist()
        [1.0, 2.0]
    """

    budget: Scalar = eqx.field(converter=scalar("budget"))

    def __check_init__(self):
        check_positive("budget", self.budget, zero=True)

    def alone(self, N: Players, y: Players) -> Players:
        total = jnp.sum(N) - N + y
        return y * (self.budget / jnp.where(total > 0, total, 1))


def class_distributions(
    labels: Sequence[ArrayLike], classes: int | None = None
) -> Float[np.ndarray, "m t"]:
    """Compute the share of each class among every client's labels.

    Args:
        labels: Every client's labels, whole numbers from 0.
        classes: The number of classes; by default one more than the largest label.

    Returns:
        Q, with one row for each client and one column for each class.

    Raises:
        InvalidInput: If a client has no labels, or a label is negative or too large.

    Example:
        >>> import fedsolve as fs
        >>> fs.games.class_distributions([[0, 0, 1, 1], [1, 2, 2, 2]]).tolist()
        [[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]]
    """
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


def as_part(name: str, given: object) -> Part:
    """Convert a part, a function of N or None (zero) to a part."""
    if given is None:
        return Sum()
    if isinstance(given, Part):
        return given
    if callable(given):
        return Plain(given)
    raise InvalidInput(
        f"{name} must be a function of N, or a part such as LinearCost, got {given!r}."
    )


def _length(values: Numbers) -> int | None:
    """Return the number of players that an array is for; None for one number for all."""
    return values.shape[0] if values.ndim else None
