"""Selection: drawing a cohort from the clients' weights.

| selection | draws | weight of a selected client in the mean |
|---|---|---|
| `Everyone` | all clients | its weight |
| `Random(count)` | uniformly, among those of positive weight | its weight |
| `Top(count)` | the largest weights; ties are broken at random | its weight |
| `Cyclic(count)` | in turn: everyone within ⌈n/count⌉ rounds, a case of `Covering` | its weight |
| `Covering(count, within)` | at random, everyone in each window (Scheme 4.1) | its weight |
| `Poisson(rate)` | each with the same probability, independently | its weight |
| `Proportional(count)` | in proportion to the weights, without replacement | equal |
| `Importance(count)` | with probabilities in proportion to the weights | 1/(nπ_j), not normalised |

Weights in the mean are normalised to sum to 1 over the clients that answered. With `equal=True` all
selected clients have equal weight, as in the papers that use weights only to select.

With `unbiased=True` they are Horvitz-Thompson weights, p_j/π_j with π_j the probability that
client j is selected, and are not normalised: Σ_{j in S} (p_j/π_j) v_j has the expectation Σ p_j v_j
over all clients. `Random` and `Cyclic` take it. Of `Proportional` π_j has no closed form, and `Top`
never draws some clients: they have no such option.
"""

from __future__ import annotations

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_count, scalar
from fedsolve.participation.sampling import sample
from fedsolve.participation.weighting import Weights, draw_proportionally
from fedsolve.types import Cohort, Flags, PRNGKey, PyTree

Turns = tuple[Int[Array, " n"], Int[Array, ""]]  # the order of the clients, and the next position


class Selection(eqx.Module):
    """Base class of selections: rules that draw a cohort from the clients' weights.

    A selection may keep state (`memory`) on the server from round to round.
    """

    def init(self, clients: int) -> PyTree:
        """Return the memory before the first round.

        Args:
            clients: The number of clients n.
        """
        return None

    @abc.abstractmethod
    def select(
        self, weights: Weights, clients: int, memory: PyTree, key: PRNGKey
    ) -> tuple[Cohort, PyTree]:
        """Draw the cohort of a round.

        Args:
            weights: The clients' weights; None if all are equal.
            clients: The number of clients n.
            memory: The memory before this round.
            key: A random key.

        Returns:
            The cohort, and the memory after this round.
        """

    @property
    def size(self) -> int | None:
        """The size of the cohort; None for all clients."""
        return None

    def joins(self, cohort: Cohort, key: PRNGKey) -> Flags | bool:
        """Return which clients of the cohort are asked: a flag for each, or True for all.

        Args:
            cohort: The cohort that was drawn.
            key: A random key.
        """
        return True

    @property
    def counts_equally(self) -> bool:
        """Whether selected clients have equal weight in the mean, whatever their weights are."""
        return False

    @property
    def counts_unbiased(self) -> bool:
        """Whether selected clients have Horvitz-Thompson weights in the mean."""
        return False

    def inclusion(self, weights: Weights, clients: int) -> Float[Array, " n"]:
        """Return π, the probability of each client to be selected.

        Args:
            weights: The clients' weights; None if all are equal.
            clients: The number of clients n.
        """
        raise InvalidInput(
            f"The probabilities with which {type(self).__name__} selects are unknown."
        )


class Everyone(Selection):
    """Select all clients.

    Example:
        >>> import fedsolve as fs
        >>> algorithm = fs.FedAvg(0.1, selection=fs.participation.Everyone())
    """

    def select(
        self, weights: Weights, clients: int, memory: None, key: PRNGKey
    ) -> tuple[Cohort, None]:
        return np.arange(clients, dtype=np.int32), None


class Poisson(Selection):
    """Select each client with the same probability, independently of the others.

    So the number of selected clients is random. Accountants of differential privacy know this as
    Poisson sampling. Answers of the others are computed and not used, as the cohort is everyone.

    Args:
        rate: The probability of a client to be selected.

    Example:
        >>> import fedsolve as fs
        >>> algorithm = fs.FedAvg(0.1, selection=fs.participation.Poisson(0.2))
        >>> algorithm.selection.rate
        0.2
    """

    rate: float = eqx.field(static=True)

    def __check_init__(self):
        if isinstance(self.rate, bool) or not isinstance(self.rate, int | float):
            raise InvalidInput(f"rate must be a probability, got {self.rate!r}.")
        if not 0 < self.rate <= 1:
            raise InvalidInput(f"rate must be a probability above 0, got {self.rate}.")

    def select(
        self, weights: Weights, clients: int, memory: None, key: PRNGKey
    ) -> tuple[Cohort, None]:
        return np.arange(clients, dtype=np.int32), None

    def joins(self, cohort: Cohort, key: PRNGKey) -> Flags:
        return jax.random.bernoulli(key, self.rate, (len(cohort),))


class _Some(Selection):
    """Base class of selections of `count` clients."""

    count: int = eqx.field(static=True)
    equal: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        check_count("count", self.count)
        if self.equal and self.counts_unbiased:
            raise InvalidInput("Give equal or unbiased weights, not both.")

    @property
    def size(self) -> int | None:
        return self.count

    @property
    def counts_equally(self) -> bool:
        return self.equal


class _Known(_Some):
    """Base class of selections that draw with known probabilities."""

    unbiased: bool = eqx.field(static=True, default=False, kw_only=True)

    @property
    def counts_unbiased(self) -> bool:
        return self.unbiased


class Random(_Known):
    """Select clients uniformly without replacement.

    Clients of weight 0 are selected only if there are fewer than `count` others.

    Args:
        count: How many clients are selected.
        equal: Whether selected clients have equal weight in the mean.
        unbiased: Whether they have Horvitz-Thompson weights, p_j/π_j, which are not normalised.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> selection = fs.participation.Random(2)
        >>> cohort, _ = selection.select(None, 5, None, jax.random.key(0))
        >>> cohort.shape
        (2,)
    """

    def select(
        self, weights: Weights, clients: int, memory: None, key: PRNGKey
    ) -> tuple[Cohort, None]:
        if weights is None:
            return sample(key, clients, min(self.count, clients)), None
        wanted = (weights > 0).astype(weights.dtype)
        return draw_proportionally(key, wanted, self.count), None

    def inclusion(self, weights: Weights, clients: int) -> Float[Array, " n"]:
        if weights is None:
            return jnp.full(clients, min(self.count / clients, 1.0))
        wanted = jnp.sum(weights > 0)
        return jnp.full(clients, jnp.minimum(self.count / jnp.maximum(wanted, 1), 1.0))


class Top(_Some):
    """Select the clients of largest weight; ties are broken at random.

    Args:
        count: How many clients are selected.
        equal: Whether selected clients have equal weight in the mean.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> weights = jnp.asarray([0.1, 0.4, 0.2, 0.3])
        >>> cohort, _ = fs.participation.Top(2).select(weights, 4, None, jax.random.key(0))
        >>> cohort.tolist()
        [1, 3]
    """

    def select(
        self, weights: Weights, clients: int, memory: None, key: PRNGKey
    ) -> tuple[Cohort, None]:
        if weights is None:  # all are tied
            return sample(key, clients, min(self.count, clients)), None
        lot = jax.random.uniform(key, weights.shape)
        order = jnp.lexsort((lot, -weights))
        return order[: min(self.count, clients)].astype(jnp.int32), None


class Proportional(_Some):
    """Select clients in proportion to their weights, without replacement.

    Selected clients have equal weight in the mean, as their weights decided who was selected.

    Args:
        count: How many clients are selected.
        equal: Without effect: selected clients always have equal weight.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> weights = jnp.asarray([0.0, 0.5, 0.0, 0.5])
        >>> cohort, _ = fs.participation.Proportional(2).select(weights, 4, None, jax.random.key(0))
        >>> sorted(cohort.tolist())
        [1, 3]
    """

    @property
    def counts_equally(self) -> bool:
        return True

    def select(
        self, weights: Weights, clients: int, memory: None, key: PRNGKey
    ) -> tuple[Cohort, None]:
        if weights is None:
            return sample(key, clients, min(self.count, clients)), None
        return draw_proportionally(key, weights, self.count), None


class Cyclic(_Known):
    """Select clients in turn, in an order drawn in the first round.

    Between two of its turns a client waits at most s_0 = ⌈n/count⌉ rounds, (21) of FedADMM.

    Args:
        count: How many clients are selected.
        equal: Whether selected clients have equal weight in the mean.
        unbiased: Whether they have Horvitz-Thompson weights, p_j/π_j, which are not normalised.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> selection, key = fs.participation.Cyclic(2), jax.random.key(0)
        >>> first, memory = selection.select(None, 4, selection.init(4), key)
        >>> second, _ = selection.select(None, 4, memory, key)
        >>> sorted(first.tolist() + second.tolist())
        [0, 1, 2, 3]
    """

    def init(self, clients: int) -> Turns:
        return jnp.full(clients, -1, jnp.int32), jnp.int32(0)

    def select(
        self, weights: Weights, clients: int, memory: Turns, key: PRNGKey
    ) -> tuple[Cohort, Turns]:
        order, turn = memory
        everyone = jnp.arange(clients, dtype=jnp.int32)
        order = jax.lax.cond(
            order[0] < 0, lambda: jax.random.permutation(key, everyone), lambda: order
        )
        count = min(self.count, clients)
        cohort = order[(turn + jnp.arange(count)) % clients]
        return cohort, (order, (turn + count) % clients)

    def inclusion(self, weights: Weights, clients: int) -> Float[Array, " n"]:
        return jnp.full(clients, min(self.count / clients, 1.0))


class Importance(_Some):
    """Select clients with probabilities in proportion to their weights, without bias.

    Client j is selected with the probability

        π_j = min(1, c q_j),    q_j = (1 − floor) p_j + floor/n,

    with p its weight and c such that `count` clients are selected in all. Its weight in the mean is
    1/(nπ_j) (Horvitz-Thompson), so Σ_{j in S} v_j/(nπ_j) has the mean of all v_j as its
    expectation, whatever the weights are. No weight is above 1/(count·floor), which bounds the
    variance by (1/(count·floor)) (1/n) Σ ‖v_j‖² also where p_j is wrong. With p_j ∝ ‖v_j‖ and
    floor → 0 the variance is the least possible (Chen, Horváth and Richtárik, "Optimal Client
    Sampling for Federated Learning", 2022): use it with `GradientNorm`.

    Clients are drawn by systematic sampling in a random order, so the cohort has a fixed size.

    Args:
        count: How many clients are selected.
        equal: Not used: weights in the mean are 1/(nπ_j).
        floor: The share of uniform draws, above 0 and at most 1; 1 is `Random(unbiased=True)`.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> selection = fs.participation.Importance(2, floor=0.2)
        >>> chances = selection.inclusion(jnp.asarray([0.7, 0.1, 0.1, 0.1]), 4)
        >>> [f"{chance:.2f}" for chance in chances]
        ['1.00', '0.33', '0.33', '0.33']
    """

    floor: Scalar = eqx.field(converter=scalar("floor"), default=0.1)

    def __check_init__(self):
        if self.equal:
            raise InvalidInput("Importance weights clients by 1/(nπ_j): leave out equal.")
        if not isinstance(self.floor, Tracer) and not 0 < float(self.floor) <= 1:
            raise InvalidInput(f"floor must be above 0 and at most 1, got {self.floor}.")

    @property
    def counts_unbiased(self) -> bool:
        return True

    @property
    def counts_equally(self) -> bool:
        return True  # weights only select: the mean is that of all clients

    def inclusion(self, weights: Weights, clients: int) -> Float[Array, " n"]:
        count = min(self.count, clients)
        if weights is None:
            return jnp.full(clients, count / clients)
        sizes = jnp.asarray((1 - self.floor) * weights + self.floor / clients)
        return inclusion_of(sizes, count)

    def select(
        self, weights: Weights, clients: int, memory: None, key: PRNGKey
    ) -> tuple[Cohort, None]:
        if weights is None:
            return sample(key, clients, min(self.count, clients)), None
        return systematic(key, self.inclusion(weights, clients), min(self.count, clients)), None


def inclusion_of(sizes: Float[Array, " n"], count: int) -> Float[Array, " n"]:
    """Return π_j = min(1, c·size_j) with Σ π_j = count; sizes are positive."""
    falling = jnp.sort(sizes)[::-1]
    rest = jnp.cumsum(falling[::-1])[::-1]  # Σ of this size and all smaller ones
    capped = jnp.arange(len(sizes))  # how many are selected for certain
    scales = (count - capped) / rest  # c, if so many are
    fits = (scales * falling <= 1) & (capped < count)
    first = jnp.argmax(fits)
    scale = jnp.where(jnp.any(fits), scales[first], jnp.inf)
    return jnp.minimum(1, scale * sizes)


def systematic(key: PRNGKey, chances: Float[Array, " n"], count: int) -> Int[Array, " m"]:
    """Draw `count` different clients, each with its own probability; these sum to `count`.

    In a random order, clients are intervals of that length on a line; those that hold one of the
    points u, u + 1, …, with u uniform in [0, 1], are drawn.
    """
    to_order, to_draw = jax.random.split(key)
    order = jax.random.permutation(to_order, jnp.arange(len(chances), dtype=jnp.int32))
    ends = jnp.cumsum(chances[order])
    places, n = jnp.arange(count), len(chances)
    points = jax.random.uniform(to_draw, (), chances.dtype) + places
    found = jnp.searchsorted(ends, points, side="right")
    found = jax.lax.cummax(jnp.minimum(found, n - count + places) - places) + places  # rounding
    return order[found]
