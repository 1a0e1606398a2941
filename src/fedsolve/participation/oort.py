"""Oort: clients with much loss that answer fast, and some that are not known yet.

Paper: Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection" (OSDI
2021), (1) and Algorithm 1.

| here | paper | |
|---|---|---|
| `count` | K | participants of a round |
| `utility` | U(i) | n_i f_i(w), when client i last took part |
| `heard` | L(i) | the round when client i last took part; 0: never |
| `exploration`, `decay`, `least` | ε, 0.98, 0.2 | the share of clients that are not known yet |
| `cutoff` | c | clients below c times the K-th largest utility are left out |
| `clip` | 0.95 | utilities are capped at this quantile |
| `durations`, `deadline`, `penalty` | t_i, T, α | slower clients count (T/t_i)^α times |

In round R a client's utility is

    (U(i) + √(0.1 ln R / L(i))) (T/t_i)^{α 1(T < t_i)},

and (1 − ε)K clients are drawn in proportion to it, among those above the cutoff. The others are
drawn from the clients that are not known, fast ones first. The paper's U(i) is n_i times the root
mean square of the losses of single samples; a client of Fedsolve has their mean.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Numbers, Scalar, check_count, check_positive, optional, scalar, static
from fedsolve.participation.weighting import LOOKS, Methods, Up, Weighting, Weights
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import Cohort, Flag, Flags, PRNGKey, PyTree, Round, Vector


class Memory(NamedTuple):
    """U(i) and L(i)."""

    utility: Float[Array, " n"]
    heard: Int[Array, " n"]


def _durations(value: object) -> Numbers | None:
    return None if value is None else np.asarray(value, float)


class Oort(Weighting):
    """Select clients with much loss that answer fast, and explore others.

    A participant also reports n_i f_i(w), one number. The `count` clients that are chosen have the
    same weight, all others have weight 0: use it with `Top(count)`.

    Args:
        count: How many clients take part.
        exploration: ε of the first round, the share of clients that were never heard.
        decay: By what factor ε decreases in each round.
        least: The least ε.
        cutoff: c, the share of the K-th largest utility that a client needs.
        clip: The quantile at which utilities are capped.
        durations: The seconds t_i that each client needs; None if they do not matter.
        deadline: T, the seconds that a round should take; None for no penalty.
        penalty: α, how much slower clients are avoided.
        look: The samples of f_i, `"all"` or a `"minibatch"`.

    Example:
        >>> import fedsolve as fs
        >>> parts = fs.participation
        >>> algorithm = fs.FedAvg(0.1, weighting=parts.Oort(3), selection=parts.Top(3))
    """

    watches_cohort = True

    count: int = eqx.field(static=True)
    exploration: Scalar = eqx.field(converter=scalar("exploration"), default=0.9)
    decay: Scalar = eqx.field(converter=scalar("decay"), default=0.98)
    least: Scalar = eqx.field(converter=scalar("least"), default=0.2)
    cutoff: Scalar = eqx.field(converter=scalar("cutoff"), default=0.95)
    clip: Scalar = eqx.field(converter=scalar("clip"), default=0.95)
    durations: Numbers | list | None = eqx.field(converter=_durations, default=None)
    deadline: Scalar | None = eqx.field(converter=optional(scalar("deadline")), default=None)
    penalty: Scalar = eqx.field(converter=scalar("penalty"), default=2.0)
    look: str = static("all")

    def __check_init__(self):
        check_count("count", self.count)
        for name in ("exploration", "decay", "least", "cutoff", "clip"):
            value = getattr(self, name)
            if isinstance(value, float) and not 0 <= value <= 1:
                raise InvalidInput(f"{name} must be from 0 to 1, got {value}.")
        if self.deadline is not None:
            check_positive("deadline", self.deadline)
            if self.durations is None:
                raise InvalidInput("deadline needs durations, the seconds that each client takes.")
        if self.durations is not None:
            check_positive("durations", self.durations)
        check_positive("penalty", self.penalty, zero=True)
        if self.look not in LOOKS:
            raise InvalidInput(f'look must be "all" or "minibatch", got {self.look!r}.')

    def check(self, problem: Problem) -> None:
        check_count("count", self.count, most=problem.n)
        if self.durations is not None and np.shape(self.durations) != (problem.n,):
            raise InvalidInput(
                f"durations has shape {np.shape(self.durations)}; for {problem.n} clients it must "
                f"be {problem.n} numbers."
            )

    def init(self, w: Vector, clients: int) -> Memory:
        return Memory(jnp.zeros(clients, w.dtype), jnp.zeros(clients, jnp.int32))

    def weigh(
        self, fed: Federation, methods: Methods, memory: Memory, up: Up, key: PRNGKey
    ) -> tuple[Weights, Memory]:
        there = jnp.broadcast_to(jnp.asarray(up), (fed.clients,))
        chosen = self.choose(memory, fed.round, there, key)
        shares = chosen / jnp.maximum(jnp.sum(chosen), 1)
        equal = jnp.full(fed.clients, 1 / fed.clients)
        return jnp.where(jnp.any(chosen), shares, equal).astype(fed.w.dtype), memory

    def choose(self, memory: Memory, round: Round, there: Flags, key: PRNGKey) -> Flags:
        """Choose the participants of a round among the clients that are there."""
        n, now = len(there), round + 1
        known = (memory.heard > 0) & there
        new = there & ~known
        to_exploit, to_explore, to_round = jax.random.split(key, 3)
        epsilon = jnp.maximum(self.exploration * self.decay**round, self.least)
        # ε K clients on average: the rest of the number is a chance
        explored = jnp.floor(epsilon * self.count + jax.random.uniform(to_round))
        explored = jnp.clip(explored, self.count - jnp.sum(known), jnp.sum(new))
        utility = self.utilities(memory, now, known)
        kept = self.count - explored
        falling = jnp.sort(utility)[::-1]
        bar = self.cutoff * falling[jnp.clip(kept - 1, 0, n - 1).astype(jnp.int32)]
        lots = jnp.log(jnp.maximum(utility, jnp.finfo(utility.dtype).tiny))
        lots = lots + jax.random.gumbel(to_exploit, (n,), utility.dtype)
        exploit = _first(jnp.where(utility >= bar, lots, -jnp.inf), known, kept)
        speed = jnp.zeros(n) if self.durations is None else -jnp.log(jnp.asarray(self.durations))
        explore = _first(speed + jax.random.gumbel(to_explore, (n,)), new, explored)
        return exploit | explore

    def utilities(self, memory: Memory, now: Round, known: Flags) -> Float[Array, " n"]:
        """Return the utility of each client in this round; 0 for those that are not known."""
        values = jnp.where(known, memory.utility, jnp.nan)
        most = jnp.nanquantile(values, self.clip)
        utility = jnp.minimum(memory.utility, jnp.where(jnp.any(known), most, 0))
        waited = jnp.sqrt(0.1 * jnp.log(now) / jnp.maximum(memory.heard, 1))
        utility = utility + waited.astype(utility.dtype)
        if self.deadline is not None:
            assert self.durations is not None
            late = jnp.asarray(self.durations) > self.deadline
            slow = (self.deadline / jnp.asarray(self.durations)) ** self.penalty
            utility = utility * jnp.where(late, slow, 1).astype(utility.dtype)
        return jnp.where(known, utility, 0)

    def watch(
        self, fed: Federation, methods: Methods, memory: Memory, cohort: Cohort, when: Flag | Flags
    ) -> Memory:
        answers = fed.ask(methods.assess, cohort, when=when)
        utility = jnp.where(answers.arrived, answers.values, memory.utility[cohort])
        heard = jnp.where(answers.arrived, fed.round + 1, memory.heard[cohort])
        return Memory(
            memory.utility.at[cohort].set(utility.astype(memory.utility.dtype)),
            memory.heard.at[cohort].set(heard.astype(jnp.int32)),
        )

    def assess(self, client: Client, message: PyTree = None) -> Float[Array, ""]:
        own = client.with_all_samples() if self.look == "all" else client
        return own.objective(client.w) * client.samples_count


def _first(scores: Float[Array, " n"], among: Flags, count: Scalar) -> Flags:
    """Flag the `count` clients of largest score among some."""
    order = jnp.lexsort((-scores, ~among))
    place = (
        jnp.zeros(len(scores), jnp.int32).at[order].set(jnp.arange(len(scores), dtype=jnp.int32))
    )
    return (place < count) & among
