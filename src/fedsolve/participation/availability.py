"""Who answers: processes by which clients come and go.

| availability | a client is up |
|---|---|
| `Bernoulli(probability)` | with that probability, anew in every round |
| `Markov(up, down)` | on and off: comes back with probability `up`, goes with `down` |
| `DayNight(day, night, period)` | in waves, each client by its own clock |
| `Trace(rounds)` | as recorded, from a file or an array |
| `FirstAnswers(count, ...)` | if its answer is among the first `count` of those drawn |

They are drawn by the server, in a simulation as in a deployment: those that are not up are not
asked. In a deployment this comes on top of what really happens there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive, read_table, scalar
from fedsolve.types import Cohort, Flags


class Availability(eqx.Module):
    """Says in every round who is up. It may remember."""

    def init(self, clients: int) -> PyTree:
        """What the server remembers for it, before the first round."""
        return None

    def draw(
        self, clients: int, round: Int[Array, ""], memory: PyTree, key: Key[Array, ""]
    ) -> tuple[Bool[Array, " n"], PyTree]:
        """Who is up in this round, and the memory after this."""
        raise NotImplementedError

    def answering(
        self, cohort: Cohort, up: Flags, clients: int, key: Key[Array, ""]
    ) -> Bool[Array, " m"] | Flags:
        """Who of the cohort answers, given who of it is up."""
        return up

    def delays(self, clients: int, key: Key[Array, ""]) -> Float[Array, " n"] | None:
        """How many seconds each client takes before it answers, where that says who answers: with
        the same key as `answering`, for a clock to count."""
        return None

    def rate(self, client: Any, round: Int[Array, ""]) -> Float[Array, "..."]:
        """q_m: how likely that client (or each of those) is up in that round."""
        raise NotImplementedError

    def check(self, clients: int) -> None:
        """Refuses, with a sentence, a number of clients that it is not made for."""


def _chance(name: str) -> Any:
    """A field that holds a probability, or one for each client."""

    def convert(value: Any) -> Any:
        if isinstance(value, list | tuple):
            value = np.asarray(value, float)
        value = scalar(name)(value)
        if not isinstance(value, Tracer):
            numbers = np.asarray(value)
            if not np.all((numbers >= 0) & (numbers <= 1)):
                raise InvalidInput(f"{name} must be between 0 and 1, got {value}.")
        return value

    return eqx.field(converter=convert)


def _of(value: Any, client: Any) -> Any:
    """That client's (or those clients') own of what may be one number for all."""
    value, client = jnp.asarray(value), jnp.asarray(client)
    return value[client] if value.ndim else jnp.broadcast_to(value, client.shape)


def _check_each(name: str, value: Any, clients: int) -> None:
    if np.ndim(value) and np.shape(value) != (clients,):
        raise InvalidInput(
            f"{name} has shape {np.shape(value)}; for {clients} clients it must be one number or "
            f"{clients} of them."
        )


class Bernoulli(Availability):
    """Up with probability q_m, independently of everything else."""

    probability: Any = _chance("probability")

    def __check_init__(self):
        if not isinstance(self.probability, Tracer) and np.any(np.asarray(self.probability) == 0):
            raise InvalidInput("A client that is never up takes no part; probability must be > 0.")

    def draw(
        self, clients: int, round: Int[Array, ""], memory: None, key: Key[Array, ""]
    ) -> tuple[Bool[Array, " n"], None]:
        return jax.random.bernoulli(key, self.rate(jnp.arange(clients), round)), None

    def rate(self, client: Any, round: Int[Array, ""]) -> Float[Array, "..."]:
        return _of(self.probability, client)

    def check(self, clients: int) -> None:
        _check_each("probability", self.probability, clients)


class Markov(Availability):
    """On and off: who is down comes up with probability `up`, who is up goes down with probability
    `down`. The first round is drawn from the long run, up/(up + down)."""

    up: Any = _chance("up")
    down: Any = _chance("down")

    def __check_init__(self):
        if not isinstance(self.up, Tracer) and np.any(np.asarray(self.up) == 0):
            raise InvalidInput("A client that never comes back takes no part; up must be > 0.")

    def init(self, clients: int) -> Bool[Array, " n"]:
        return jnp.zeros(clients, bool)

    def draw(
        self, clients: int, round: Int[Array, ""], memory: Array, key: Key[Array, ""]
    ) -> tuple[Bool[Array, " n"], Array]:
        who = jnp.arange(clients)
        stays = jnp.where(memory, 1 - _of(self.down, who), _of(self.up, who))
        now = jax.random.bernoulli(key, jnp.where(round == 0, self.rate(who, round), stays))
        return now, now

    def rate(self, client: Any, round: Int[Array, ""]) -> Float[Array, "..."]:
        up, down = _of(self.up, client), _of(self.down, client)
        return up / (up + down)

    def check(self, clients: int) -> None:
        _check_each("up", self.up, clients)
        _check_each("down", self.down, clients)


class DayNight(Availability):
    """Up with a probability that swings between `night` and `day` once in `period` rounds. Client m
    is `phase[m]` of a period late; by default clients are spread around the clock, by the golden
    ratio."""

    day: Any = _chance("day")
    night: Any = _chance("night")
    period: Any = eqx.field(converter=scalar("period"), default=24.0)
    phase: Any = None

    def __check_init__(self):
        check_positive("period", self.period)

    def draw(
        self, clients: int, round: Int[Array, ""], memory: None, key: Key[Array, ""]
    ) -> tuple[Bool[Array, " n"], None]:
        return jax.random.bernoulli(key, self.rate(jnp.arange(clients), round)), None

    def rate(self, client: Any, round: Int[Array, ""]) -> Float[Array, "..."]:
        late = 0.6180339887 * client if self.phase is None else _of(self.phase, client)
        sun = (1 + jnp.cos(2 * jnp.pi * (round / self.period - late))) / 2
        day, night = _of(self.day, client), _of(self.night, client)
        return night + (day - night) * sun

    def check(self, clients: int) -> None:
        for name in ("day", "night", "phase"):
            if getattr(self, name) is not None:
                _check_each(name, getattr(self, name), clients)


class Trace(Availability):
    """As recorded: a table of one row a round and one column a client, 1 where it was up. From an
    array, or from a file (`.npy`, or text with commas). After its last row it begins again."""

    rounds: str | Path | Shaped[Array, "..."] | Shaped[np.ndarray, "..."] = eqx.field(
        converter=lambda value: _recorded(value)
    )

    def draw(
        self, clients: int, round: Int[Array, ""], memory: None, key: Key[Array, ""]
    ) -> tuple[Bool[Array, " n"], None]:
        table = jnp.asarray(self.rounds)
        return table[round % len(table), jnp.arange(clients)], None

    def rate(self, client: Any, round: Int[Array, ""]) -> Float[Array, "..."]:
        return jnp.mean(jnp.asarray(self.rounds)[:, client], axis=0)

    def check(self, clients: int) -> None:
        columns = np.asarray(self.rounds).shape[1]
        if columns != clients:
            raise InvalidInput(f"The trace has {columns} columns, but there are {clients} clients.")


def _recorded(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, str | Path):
        value = read_table("the trace", value)
    try:
        table = np.atleast_2d(np.asarray(value))
    except ValueError:  # rows of different lengths
        table = np.zeros(0)
    if table.ndim != 2 or not table.size or not np.isin(table, (0, 1)).all():
        raise InvalidInput(
            "A trace is a table of 0 and 1: a row for each round, a column a client."
        )
    return table.astype(bool)


class FirstAnswers(Availability):
    """Stragglers: of those drawn, only the first `count` answers are waited for. A client takes
    `median`·exp(`spread`·N(0, 1)) seconds for its answer (`median` may be one number for each
    client), which a clock counts too; `availability` says who is up at all.

    Who is late is drawn beforehand, and the late are not asked: nothing is charged for them.
    """

    count: int = eqx.field(static=True)
    median: Any = eqx.field(converter=lambda value: _numbers(value, "median"), default=1.0)
    spread: Any = eqx.field(converter=scalar("spread"), default=1.0)
    availability: Availability | None = eqx.field(
        converter=lambda value: as_availability(value), default=None
    )

    def __check_init__(self):
        check_count("count", self.count)
        check_positive("median", self.median)
        check_positive("spread", self.spread, zero=True)

    def init(self, clients: int) -> PyTree:
        return None if self.availability is None else self.availability.init(clients)

    def draw(
        self, clients: int, round: Int[Array, ""], memory: PyTree, key: Key[Array, ""]
    ) -> tuple[Bool[Array, " n"], PyTree]:
        if self.availability is None:
            return jnp.ones(clients, bool), None
        return self.availability.draw(clients, round, memory, key)

    def answering(
        self, cohort: Cohort, up: Flags, clients: int, key: Key[Array, ""]
    ) -> Bool[Array, " m"]:
        latency = jnp.where(up, self.delays(clients, key)[jnp.asarray(cohort)], jnp.inf)
        place = jnp.argsort(jnp.argsort(latency))
        return (place < self.count) & up

    def delays(self, clients: int, key: Key[Array, ""]) -> Float[Array, " n"]:
        noise = jnp.exp(self.spread * jax.random.normal(key, (clients,)))
        return _of(self.median, jnp.arange(clients)) * noise

    def rate(self, client: Any, round: Int[Array, ""]) -> Float[Array, "..."]:
        raise InvalidInput(
            "How likely a client is among the first answers depends on who else is drawn."
        )

    def check(self, clients: int) -> None:
        _check_each("median", self.median, clients)
        if self.availability is not None:
            self.availability.check(clients)


def _numbers(value: Any, name: str) -> Any:
    return np.asarray(value, float) if isinstance(value, list | tuple) else scalar(name)(value)


def as_availability(value: Any) -> Availability | None:
    """An availability as the user may give it: a number (or one for each client) is `Bernoulli`."""
    if value is None or isinstance(value, Availability):
        return value
    if isinstance(value, str | bool) or callable(value):
        raise InvalidInput(
            f"availability must be a number between 0 and 1 or an Availability, got {value!r}."
        )
    return Bernoulli(value)
