"""Simulated time: how long a round would take over real links.

In an exchange, client j takes

    t_j = 2·latency_j + 8·(bytes down to j)/down_j + work/speed_j + 8·(bytes up from j)/up_j,

and the server goes on when the slowest of those that it waits for has answered; a round is the sum
of its exchanges. Bytes are those that are counted, packets that j missed before included. Answers
that are lost are not waited for, and the server's own work takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Key, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_count, check_kind, check_positive, read_table, scalar
from fedsolve.types import Cohort, Flags, Number, PRNGKey, Round

TRAITS = ("speed", "up", "down", "latency")
OWN = 2**31 - 3  # keys that no round has: a client's traits are the same all run
EACH_ROUND = 2**31 - 4  # and that no exchange has
Numbers = Shaped[Array, "..."] | Shaped[np.ndarray, "..."]
Trait = str | Path | object  # a number, numbers, a distribution, or a file (the string)


class Seconds(eqx.Module):
    """A sum that loses nothing over many rounds, in two parts (Knuth's two-sum)."""

    total: Float[Array, ...]
    rest: Float[Array, ...]

    @classmethod
    def zero(cls) -> Seconds:
        return cls(jnp.zeros(()), jnp.zeros(()))

    def plus(self, more: Number) -> Seconds:
        rough = self.total + more
        back = rough - self.total
        rest = self.rest + ((self.total - (rough - back)) + (more - back))
        total = rough + rest
        return Seconds(total, rest - (total - rough))

    def exact(self) -> Float[np.ndarray, "..."]:
        """Return the sum in double precision, on the host."""
        return np.asarray(np.asarray(self.total, np.float64) + np.asarray(self.rest, np.float64))


class Distribution(eqx.Module):
    """A trait that is drawn for each client: once, or with `every_round` anew in each round."""

    every_round: bool = eqx.field(static=True, default=False, kw_only=True)

    def draw(self, key: Key[Array, ""]) -> Float[Array, ""]:
        """Draw one client's value from its own key."""
        raise NotImplementedError


class LogNormal(Distribution):
    """A log-normal distribution: median·exp(spread·N(0, 1)).

    Args:
        median: The median.
        spread: The standard deviation of the logarithm.
        every_round: Whether to draw anew in each round.

    Example:
        >>> import fedsolve as fs
        >>> float(fs.LogNormal(1e6, 0.5).median)
        1000000.0
    """

    median: Scalar = eqx.field(converter=scalar("median"))
    spread: Scalar = eqx.field(converter=scalar("spread"))

    def __check_init__(self):
        check_positive("median", self.median)
        check_positive("spread", self.spread, zero=True)

    def draw(self, key: Key[Array, ""]) -> Float[Array, ""]:
        return jnp.asarray(self.median * jnp.exp(self.spread * jax.random.normal(key)))


class Mixture(Distribution):
    """One of some values, each with its share of the clients.

    Args:
        values: The values.
        shares: Their shares; they need not add up to 1.
        every_round: Whether to draw anew in each round.

    Example:
        >>> import fedsolve as fs
        >>> fs.Mixture([1e6, 1e8], [0.3, 0.7]).values.shape
        (2,)
    """

    values: Numbers = eqx.field(converter=lambda value: _list("values", value))
    shares: Numbers = eqx.field(converter=lambda value: _list("shares", value))

    def __check_init__(self):
        if isinstance(self.shares, Tracer):
            return
        check_positive("values", self.values)
        check_positive("shares", self.shares, zero=True)
        if np.shape(self.values) != np.shape(self.shares) or not np.sum(self.shares) > 0:
            raise InvalidInput("A mixture has one share for each value, and not all of them 0.")

    def draw(self, key: Key[Array, ""]) -> Float[Array, ""]:
        shares = jnp.asarray(self.shares)
        which = jax.random.choice(key, shares.size, p=shares / jnp.sum(shares))
        return jnp.asarray(self.values)[which]


class Clock(eqx.Module):
    """How long clients take, for `solve(..., clock=...)`.

    What clients have is one number for all, one for each, a `LogNormal` or `Mixture`, or a table
    with one row a round and one column a client, as an array or in a file (`.npy`, or text with
    commas); after its last row it begins again.

    Args:
        work: Seconds of computing for one answer, on a client of speed 1: a number, or one for each
            of the algorithm's client methods, by name (`{"improve": 0.5}`; others take no time).
        speed: Of each client.
        up: Of each client's link, in bits a second.
        down: Of each client's link, in bits a second.
        latency: Of each client's link, one way, in seconds.
        first: How many answers of each exchange are waited for; the late ones are lost.

    Example:
        >>> import fedsolve as fs
        >>> fs.Clock(work=0.1, up=fs.LogNormal(1e6, 0.5), latency=0.05).first is None
        True
    """

    work: Scalar | dict[str, Scalar] = eqx.field(converter=lambda value: _work(value), default=0.0)
    speed: Trait = eqx.field(converter=lambda value: _trait("speed", value), default=1.0)
    up: Trait = eqx.field(converter=lambda value: _trait("up", value), default=np.inf)
    down: Trait = eqx.field(converter=lambda value: _trait("down", value), default=np.inf)
    latency: Trait = eqx.field(converter=lambda value: _trait("latency", value), default=0.0)
    first: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.first is not None:
            check_count("first", self.first)

    def check(self, clients: int) -> None:
        """Raise if the clock is made for another number of clients."""
        for name in TRAITS:
            shape = np.shape(getattr(self, name)) if _plain(getattr(self, name)) else ()
            if shape and shape[-1] != clients:
                raise InvalidInput(
                    f"clock.{name} is for {shape[-1]} clients, but there are {clients}."
                )

    def times(
        self,
        method: str,
        cohort: Cohort,
        sent_down: Float[Array, " m"] | float,
        sent_up: int,
        round: Round,
        seed: PRNGKey,
    ) -> Float[Array, " m"]:
        """Return how long each client of the cohort takes to answer.

        Args:
            method: The name of the method that clients run.
            cohort: The clients.
            sent_down: Bytes to each of them.
            sent_up: Bytes from each of them.
            round: The round.
            seed: The run's key.
        """
        own = {name: self._of(name, cohort, round, seed) for name in TRAITS}
        work = self.work.get(method, 0.0) if isinstance(self.work, Mapping) else self.work
        sent = 8 * (sent_down / own["down"] + sent_up / own["up"])
        return 2 * own["latency"] + work / own["speed"] + sent

    def waited_for(self, arriving: Flags, times: Float[Array, " m"]) -> Flags:
        """Return whose answers the server takes, of those that would arrive."""
        if self.first is None:
            return arriving
        place = jnp.argsort(jnp.argsort(jnp.where(arriving, times, jnp.inf)))
        return (place < self.first) & arriving

    def _of(self, name: str, cohort: Cohort, round: Round, seed: PRNGKey) -> Float[Array, " m"]:
        """Return a trait of each client of the cohort."""
        value = getattr(self, name)
        if isinstance(value, Distribution):
            key = jax.random.fold_in(seed, OWN)
            if value.every_round:
                key = jax.random.fold_in(jax.random.fold_in(seed, round), EACH_ROUND)
            key = jax.random.fold_in(key, TRAITS.index(name))
            return jax.vmap(lambda j: value.draw(jax.random.fold_in(key, j)))(jnp.asarray(cohort))
        value = jnp.asarray(value)
        if value.ndim == 2:
            value = value[round % len(value)]
        return value[cohort] if value.ndim else jnp.broadcast_to(value, (len(cohort),))


def _plain(value: object) -> bool:
    return not isinstance(value, Distribution)


def _trait(name: str, value: Any) -> object:
    if isinstance(value, Distribution | Tracer | jax.Array):
        return value
    if isinstance(value, str | Path):
        value = read_table(f"clock.{name}", value)
    value = np.asarray(value, float) if np.ndim(value) else scalar(name)(value)
    numbers = np.asarray(value)
    if not np.all(numbers >= 0 if name == "latency" else numbers > 0) or numbers.ndim > 2:
        least = "at least 0" if name == "latency" else "positive"
        raise InvalidInput(f"clock.{name} must be {least}, got {value}.")
    return value


def _work(value: Any) -> Scalar | dict[str, Scalar]:
    if isinstance(value, Mapping):
        return {name: _seconds(f"clock.work.{name}", each) for name, each in value.items()}
    return _seconds("clock.work", value)


def _seconds(name: str, value: Any) -> Any:
    value = scalar(name)(value)
    check_positive(name, value, zero=True)
    return value


def _list(name: str, value: Any) -> Any:
    if isinstance(value, Tracer | jax.Array):
        return value
    if np.ndim(value) != 1 or not np.size(value):
        raise InvalidInput(f"{name} must be a list of numbers, got {value!r}.")
    return np.asarray(value, float)


def check_clock(clock: Clock | None, clients: int) -> None:
    """Raise if this is no clock for that many clients."""
    if clock is not None:
        check_kind("clock", clock, Clock)
        clock.check(clients)
