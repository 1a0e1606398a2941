"""Availability: random processes by which clients come and go.

| availability | a client is up |
|---|---|
| `Bernoulli(probability)` | with that probability, independently in every round |
| `Markov(up, down)` | on and off: comes up with probability `up`, goes down with `down` |
| `DayNight(day, night, period)` | with a probability that follows the time of day |
| `Trace(rounds)` | as recorded in a file or an array |
| `FirstAnswers(count, ...)` | if its answer is among the first `count` of the cohort |

The server draws them, in a simulation as in a deployment, and does not ask clients that are down.
In a deployment, real failures come on top.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.fields import Numbers, Scalar, check_count, check_positive, read_table, scalar
from fedsolve.types import Cohort, Flags, PRNGKey, PyTree, Round

Each = Scalar | Numbers  # one number for all clients, or one for each
Clients = Int[Array, "..."] | Int[np.ndarray, "..."] | int  # the index of a client, or of several
Recorded = Bool[np.ndarray, "rounds clients"] | Shaped[Array, "..."]


SELDOM = 0.05  # a client that is up less often makes 1/q_m large
SLOW = 0.1  # of the changes that independent rounds would make


class Availability(eqx.Module):
    """Base class of availabilities: processes that decide in every round which clients are up.

    An availability may keep state (`memory`) on the server from round to round.
    """

    def init(self, clients: int) -> PyTree:
        """Return the memory before the first round.

        Args:
            clients: The number of clients n.
        """
        return None

    @abc.abstractmethod
    def draw(
        self, clients: int, round: Round, memory: PyTree, key: PRNGKey
    ) -> tuple[Bool[Array, " n"], PyTree]:
        """Draw which clients are up.

        Args:
            clients: The number of clients n.
            round: The round, counted from 0.
            memory: The memory before this round.
            key: A random key.

        Returns:
            A flag for each client, and the memory after this round.
        """

    def answering(self, cohort: Cohort, up: Flags, clients: int, key: PRNGKey) -> Flags:
        """Return which clients of the cohort answer, given which of them are up."""
        return up

    def delays(self, clients: int, key: PRNGKey) -> Float[Array, " n"] | None:
        """Return the seconds that each client takes to answer, if they decide who answers.

        With the same key as `answering`, so that a clock counts the same times.
        """
        return None

    def rate(self, client: Clients, round: Round) -> Float[Array, "..."]:
        """Return q_m, the probability that a client (or each of several) is up in a round."""
        raise NotImplementedError

    def rates(self, clients: int) -> Float[np.ndarray, " n"] | None:
        """Return q_m of every client if it is the same in every round, whatever happened before.

        None where rounds depend on each other, or q_m is not known.
        """
        return None

    def risk(self, clients: int) -> str | None:
        """Return a sentence if weights 1/q_m make an algorithm unstable, else None."""
        return None

    def check(self, clients: int) -> None:
        """Raise if the availability does not fit the number of clients."""


def _probability(name: str) -> Callable[[object], Each]:
    """Make a converter for a field that holds a probability, or one for each client."""

    def convert(value: object) -> Each:
        if isinstance(value, list | tuple):
            value = np.asarray(value, float)
        probability = scalar(name)(value)
        if not isinstance(probability, Tracer):
            numbers = np.asarray(probability)
            if not np.all((numbers >= 0) & (numbers <= 1)):
                raise InvalidInput(f"{name} must be between 0 and 1, got {probability}.")
        return probability

    return convert


def _of(value: Each, client: Clients) -> Array:
    """Select the numbers of some clients; one number stands for all clients."""
    value, client = jnp.asarray(value), jnp.asarray(client)
    return value[client] if value.ndim else jnp.broadcast_to(value, client.shape)


def _check_each(name: str, value: Each, clients: int) -> None:
    """Raise if there is neither one number nor one for each client."""
    if np.ndim(value) and np.shape(value) != (clients,):
        raise InvalidInput(
            f"{name} has shape {np.shape(value)}; for {clients} clients it must be one number or "
            f"{clients} of them."
        )


class Bernoulli(Availability):
    """Each client is up with probability q_m, independently in every round.

    Args:
        probability: q, one number or one for each client.

    Example:
        >>> import fedsolve as fs
        >>> algorithm = fs.FedAvg(0.1, availability=0.7)
        >>> algorithm.availability
        Bernoulli(probability=0.7)
    """

    probability: Each = eqx.field(converter=_probability("probability"))

    def __check_init__(self):
        if not isinstance(self.probability, Tracer) and np.any(np.asarray(self.probability) == 0):
            raise InvalidInput("A client that is never up takes no part; probability must be > 0.")

    def draw(
        self, clients: int, round: Round, memory: None, key: PRNGKey
    ) -> tuple[Bool[Array, " n"], None]:
        return jax.random.bernoulli(key, self.rate(jnp.arange(clients), round)), None

    def rate(self, client: Clients, round: Round) -> Float[Array, "..."]:
        return _of(self.probability, client)

    def rates(self, clients: int) -> Float[np.ndarray, " n"]:
        return np.broadcast_to(np.asarray(self.probability, float), (clients,))

    def risk(self, clients: int) -> str | None:
        return _seldom(self.rates(clients))

    def check(self, clients: int) -> None:
        _check_each("probability", self.probability, clients)


class Markov(Availability):
    """Each client goes on and off as a Markov chain, which starts in its stationary distribution.

    Args:
        up: The probability that a client that is down comes up; one number or one for each client.
        down: The probability that a client that is up goes down.

    Example:
        >>> import fedsolve as fs
        >>> availability = fs.participation.Markov(up=0.5, down=0.1)
        >>> round(float(availability.rate(0, round=0)), 3)
        0.833
    """

    up: Each = eqx.field(converter=_probability("up"))
    down: Each = eqx.field(converter=_probability("down"))

    def __check_init__(self):
        if not isinstance(self.up, Tracer) and np.any(np.asarray(self.up) == 0):
            raise InvalidInput("A client that never comes back takes no part; up must be > 0.")

    def init(self, clients: int) -> Bool[Array, " n"]:
        return jnp.zeros(clients, bool)

    def draw(
        self, clients: int, round: Round, memory: Bool[Array, " n"], key: PRNGKey
    ) -> tuple[Bool[Array, " n"], Bool[Array, " n"]]:
        everyone = jnp.arange(clients)
        stays = jnp.where(memory, 1 - _of(self.down, everyone), _of(self.up, everyone))
        now = jax.random.bernoulli(key, jnp.where(round == 0, self.rate(everyone, round), stays))
        return now, now

    def rate(self, client: Clients, round: Round) -> Float[Array, "..."]:
        up, down = _of(self.up, client), _of(self.down, client)
        return up / (up + down)

    def risk(self, clients: int) -> str | None:
        changes = np.broadcast_to(np.asarray(self.up) + np.asarray(self.down), (clients,))
        rates = np.asarray(self.up) / changes
        varies = np.asarray(self.down) > 0  # one that never goes down does not change
        return _seldom(rates) or _slow(np.where(varies, changes, 1.0))

    def check(self, clients: int) -> None:
        _check_each("up", self.up, clients)
        _check_each("down", self.down, clients)


class DayNight(Availability):
    """Each client is up with a probability that follows the time of day.

    Args:
        day: The largest probability; one number or one for each client.
        night: The smallest probability.
        period: The number of rounds in a day.
        phase: By what share of a day each client is late; None to spread clients around the clock
            by the golden ratio.

    Example:
        >>> import fedsolve as fs
        >>> availability = fs.participation.DayNight(day=0.9, night=0.1, period=24)
        >>> [f"{availability.rate(0, round):.3f}" for round in (0, 6, 12)]
        ['0.900', '0.500', '0.100']
    """

    day: Each = eqx.field(converter=_probability("day"))
    night: Each = eqx.field(converter=_probability("night"))
    period: Scalar = eqx.field(converter=scalar("period"), default=24.0)
    phase: Each | None = eqx.field(
        converter=lambda value: None if value is None else _numbers(value, "phase"), default=None
    )

    def __check_init__(self):
        check_positive("period", self.period)
        if isinstance(self.day, Tracer) or isinstance(self.night, Tracer):
            return
        if np.any((np.asarray(self.day) == 0) & (np.asarray(self.night) == 0)):
            raise InvalidInput("A client that is never up takes no part; day must be > 0.")

    def draw(
        self, clients: int, round: Round, memory: None, key: PRNGKey
    ) -> tuple[Bool[Array, " n"], None]:
        return jax.random.bernoulli(key, self.rate(jnp.arange(clients), round)), None

    def rate(self, client: Clients, round: Round) -> Float[Array, "..."]:
        late = 0.6180339887 * client if self.phase is None else _of(jnp.asarray(self.phase), client)
        sun = (1 + jnp.cos(2 * jnp.pi * (round / self.period - late))) / 2
        day, night = _of(self.day, client), _of(self.night, client)
        return night + (day - night) * sun

    def risk(self, clients: int) -> str | None:
        least = np.minimum(np.asarray(self.day), np.asarray(self.night))
        return _seldom(np.broadcast_to(least, (clients,)))

    def check(self, clients: int) -> None:
        for name in ("day", "night", "phase"):
            if getattr(self, name) is not None:
                _check_each(name, getattr(self, name), clients)


class Trace(Availability):
    """Clients are up as recorded in a table of 0 and 1.

    Args:
        rounds: The table as an array, or the path of a file (`.npy`, or text with commas): a row
            for each round, a column for each client. After the last row it starts again.

    Example:
        >>> import fedsolve as fs
        >>> availability = fs.participation.Trace([[1, 1, 0], [0, 1, 1]])
        >>> [float(availability.rate(client, round=0)) for client in range(3)]
        [0.5, 1.0, 0.5]
    """

    rounds: str | Path | Shaped[Array, "..."] | Shaped[np.ndarray, "..."] = eqx.field(
        converter=lambda value: _recorded(value)
    )

    def __check_init__(self):
        if isinstance(self.rounds, Tracer):
            return
        never = np.flatnonzero(~np.asarray(self.rounds).astype(bool).any(axis=0))
        if len(never):
            raise InvalidInput(
                f"Client {never[0]} is never up in the trace: it takes no part, and what is solved "
                "is another problem; leave such clients out."
            )

    def draw(
        self, clients: int, round: Round, memory: None, key: PRNGKey
    ) -> tuple[Bool[Array, " n"], None]:
        table = jnp.asarray(self.rounds)
        return table[round % len(table), jnp.arange(clients)], None

    def rate(self, client: Clients, round: Round) -> Float[Array, "..."]:
        return jnp.mean(jnp.asarray(self.rounds)[:, client], axis=0)

    def risk(self, clients: int) -> str | None:
        table = np.asarray(self.rounds).astype(bool)
        rates, changes = table.mean(axis=0), (table[1:] != table[:-1]).sum(axis=0)
        usual = 2 * rates * (1 - rates) * (len(table) - 1)  # of independent rounds
        long_enough = usual >= 10
        pace = np.where(long_enough, changes / np.where(long_enough, usual, 1), 1.0)
        return _seldom(rates) or _slow(pace)

    def check(self, clients: int) -> None:
        columns = np.asarray(self.rounds).shape[1]
        if columns != clients:
            raise InvalidInput(f"The trace has {columns} columns, but there are {clients} clients.")


def _recorded(value: object) -> Recorded:
    """Convert a table or a file to flags."""
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
            "A trace is a table of 0 and 1: a row for each round, a column for each client."
        )
    return table.astype(bool)


class FirstAnswers(Availability):
    """Only the first answers of the cohort count; later clients are stragglers.

    A client takes median·exp(spread·N(0, 1)) seconds to answer, which a clock counts too. Latencies
    are drawn before clients are asked, and stragglers are not asked: they cost no bytes.

    Args:
        count: How many answers are waited for.
        median: The median of a client's seconds; one number or one for each client.
        spread: The standard deviation of the logarithm of the seconds.
        availability: Which clients are up at all; None for all of them.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> availability = fs.participation.FirstAnswers(2, median=[1.0, 1.0, 50.0, 1.0])
        >>> cohort, up = jnp.arange(4), jnp.ones(4, bool)
        >>> int(availability.answering(cohort, up, 4, jax.random.key(0)).sum())
        2
    """

    count: int = eqx.field(static=True)
    median: Each = eqx.field(converter=lambda value: _numbers(value, "median"), default=1.0)
    spread: Scalar = eqx.field(converter=scalar("spread"), default=1.0)
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
        self, clients: int, round: Round, memory: PyTree, key: PRNGKey
    ) -> tuple[Bool[Array, " n"], PyTree]:
        if self.availability is None:
            return jnp.ones(clients, bool), None
        return self.availability.draw(clients, round, memory, key)

    def answering(self, cohort: Cohort, up: Flags, clients: int, key: PRNGKey) -> Flags:
        latency = jnp.where(up, self.delays(clients, key)[jnp.asarray(cohort)], jnp.inf)
        place = jnp.argsort(jnp.argsort(latency))
        return (place < self.count) & up

    def delays(self, clients: int, key: PRNGKey) -> Float[Array, " n"]:
        noise = jnp.exp(self.spread * jax.random.normal(key, (clients,)))
        return _of(self.median, jnp.arange(clients)) * noise

    def rate(self, client: Clients, round: Round) -> Float[Array, "..."]:
        raise InvalidInput(
            "The probability that a client is among the first answers depends on the cohort."
        )

    def check(self, clients: int) -> None:
        _check_each("median", self.median, clients)
        if self.availability is not None:
            self.availability.check(clients)


def _seldom(rates: Float[np.ndarray, " n"]) -> str | None:
    """Return a warning if some client is up so seldom that 1/q_m explodes."""
    least = int(np.argmin(rates))
    if rates[least] >= SELDOM:
        return None
    times = f"{1 / rates[least]:.3g}" if rates[least] > 0 else "any number of"
    return (
        f"client {least} is up with probability {rates[least]:.3g} at times, and its gradients "
        f"count {times} times then: single rounds move far"
    )


def _slow(pace: Float[np.ndarray, " n"]) -> str | None:
    """Return a warning if some client stays up or down for many rounds."""
    least = int(np.argmin(pace))
    if pace[least] >= SLOW:
        return None
    return (
        f"client {least} stays up or down {1 / pace[least]:.3g} times as long as in independent "
        "rounds: 1/q_m is right on average over rounds, not while it lasts"
    )


def _numbers(value: object, name: str) -> Each:
    """Convert a number, or a list with one for each client."""
    return np.asarray(value, float) if isinstance(value, list | tuple) else scalar(name)(value)


def as_availability(value: object) -> Availability | None:
    """Convert what a user may give for an availability.

    A number, or one for each client, means `Bernoulli`.
    """
    if value is None or isinstance(value, Availability):
        return value
    if isinstance(value, str | bool) or callable(value):
        raise InvalidInput(
            f"availability must be a number between 0 and 1 or an Availability, got {value!r}."
        )
    return Bernoulli(value)
