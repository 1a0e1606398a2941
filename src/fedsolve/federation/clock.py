"""Simulated time: how long a round would take over real links.

In an exchange, client j takes

    t_j = 2·latency_j + 8·(bytes down to j)/down_j + work/speed_j + 8·(bytes up from j)/up_j,

and the server goes on when the slowest of those that it waits for has answered; a round is the sum
of its exchanges. Bytes are those of the meter, packets that j missed before included. Answers that
are lost are not waited for, and the server's own work takes no time.
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
from jaxtyping import Array, Bool, Float, Int, Key

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_count, check_kind, check_positive, read_table, scalar
from fedsolve.types import Number

TRAITS = ("speed", "up", "down", "latency")
OWN = 2**31 - 3  # keys that no round has: a client's traits are the same all run
EACH_ROUND = 2**31 - 4  # and that no exchange has
Trait = str | Path | Any  # a string is a file


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

    def exact(self) -> Any:
        """On the host: the sum in double precision."""
        return np.asarray(self.total, np.float64) + np.asarray(self.rest, np.float64)


class Distribution(eqx.Module):
    """What clients have, drawn for each of them: once, or with `every_round` anew in each round."""

    every_round: bool = eqx.field(static=True, default=False, kw_only=True)

    def draw(self, key: Key[Array, ""]) -> Float[Array, ""]:
        """One client's, from its own key."""
        raise NotImplementedError


class LogNormal(Distribution):
    """median·exp(spread·N(0, 1))."""

    median: Scalar = eqx.field(converter=scalar("median"))
    spread: Scalar = eqx.field(converter=scalar("spread"))

    def __check_init__(self):
        check_positive("median", self.median)
        check_positive("spread", self.spread, zero=True)

    def draw(self, key: Key[Array, ""]) -> Float[Array, ""]:
        return jnp.asarray(self.median * jnp.exp(self.spread * jax.random.normal(key)))


class Mixture(Distribution):
    """One of the values, each with its share of the clients: `Mixture([1e6, 1e8], [0.3, 0.7])`."""

    values: Any = eqx.field(converter=lambda value: _list("values", value))
    shares: Any = eqx.field(converter=lambda value: _list("shares", value))

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
    """What time things take, for `solve(..., clock=...)`.

    - `work`: seconds of computing for one answer, on a client of speed 1; a number, or one for each
      of the algorithm's client methods, by name (`{"improve": 0.5}`; others take no time).
    - `speed`: of each client.
    - `up`, `down`: of each client's link, in bits a second.
    - `latency`: of each client's link, one way, in seconds.
    - `first`: of each exchange only that many answers are waited for; the late ones are lost.

    What clients have is one number for all, one for each, a `LogNormal` or `Mixture`, or a table of
    one row a round and one column a client, as an array or in a file (`.npy`, or text with commas);
    after its last row it begins again.
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
        """Refuses, with a sentence, a number of clients that it is not made for."""
        for name in TRAITS:
            shape = np.shape(getattr(self, name)) if _plain(getattr(self, name)) else ()
            if shape and shape[-1] != clients:
                raise InvalidInput(
                    f"clock.{name} is for {shape[-1]} clients, but there are {clients}."
                )

    def times(
        self,
        method: str,
        cohort: Int[Array, " m"] | Int[np.ndarray, " m"],
        sent_down: Any,
        sent_up: Any,
        round: Int[Array, ""],
        seed: Key[Array, ""],
    ) -> Float[Array, " m"]:
        """How long each of the cohort takes to answer, from the bytes that go down and up."""
        own = {name: self._of(name, cohort, round, seed) for name in TRAITS}
        work = self.work.get(method, 0.0) if isinstance(self.work, Mapping) else self.work
        sent = 8 * (sent_down / own["down"] + sent_up / own["up"])
        return 2 * own["latency"] + work / own["speed"] + sent

    def waited_for(
        self, arriving: Bool[Array, " m"] | Bool[np.ndarray, " m"], times: Float[Array, " m"]
    ) -> Bool[Array, " m"] | Bool[np.ndarray, " m"]:
        """Whose answers the server takes, of those that would arrive."""
        if self.first is None:
            return arriving
        place = jnp.argsort(jnp.argsort(jnp.where(arriving, times, jnp.inf)))
        return (place < self.first) & arriving

    def _of(self, name: str, cohort: Any, round: Any, seed: Key[Array, ""]) -> Float[Array, " m"]:
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


def _plain(value: Any) -> bool:
    return not isinstance(value, Distribution)


def _trait(name: str, value: Any) -> Any:
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


def _work(value: Any) -> Any:
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
    """Refuses what is no clock for so many clients."""
    if clock is not None:
        check_kind("clock", clock, Clock)
        clock.check(clients)
