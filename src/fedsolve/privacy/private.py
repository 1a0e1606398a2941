"""Differential privacy of clients: clip what they send, add noise to its sums, count what is spent.

Every reply r_j of an exchange is clipped on the client, c_j = r_j · min(1, C/‖r_j‖). The algorithm
gets only sums, Σ a_j c_j + N(0, (z C max_j |a_j|)² I), and means, which are such sums over a number
that does not depend on data. Nothing else that a client says can reach an algorithm.

| here | | |
|---|---|---|
| `clip` | C | of each exchange |
| `noise` | z | of each exchange, in units of its clip |
| `epsilon`, `delta` | ε, δ | what the whole run may spend |

The mechanism is that of McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private
Recurrent Language Models" (2018), applied to every exchange of a round. What is clipped is what
is sent, so that error feedback keeps the rest for later rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from fedsolve.algorithms.base import Algorithm
from fedsolve.algorithms.participating import Participating
from fedsolve.compression.clipping import dense
from fedsolve.errors import InvalidInput
from fedsolve.federation.options import RoundOptions
from fedsolve.federation.rules import EVALUATION
from fedsolve.federation.state import State
from fedsolve.fields import Scalar, check_count, check_positive, optional, scalar, static
from fedsolve.participation.selection import Poisson, Random
from fedsolve.participation.weighting import Uniform
from fedsolve.privacy.accounting import (
    ACCOUNTANTS,
    Accountant,
    Ledger,
    Sampling,
    least_scale,
    together,
)
from fedsolve.privacy.plan import NoisySums, Plan
from fedsolve.privacy.sample_plan import plan_samples
from fedsolve.problem.constraints import Mean
from fedsolve.problem.problem import Problem
from fedsolve.runtimes.evaluation import client_values
from fedsolve.runtimes.recording import RoundRecord, record_round
from fedsolve.types import PyTree

EVALUATIONS = ("private", "outside")
UNITS = ("client", "sample")
By = Scalar | dict[str, Scalar]
A = TypeVar("A", bound=Accountant)


class Private(eqx.Module):
    """Client-level differential privacy, for `fs.solve(..., privacy=...)`.

    Give the `noise`, or a budget `epsilon`, for which the noise is then chosen. With both the run
    stops before it would spend more. The history has ε so far as `epsilon`.

    All that clients say is covered: updates, constraint values, statistics and evaluations. An
    algorithm that looks at single replies (losses for selection, sizes for weights) is refused.

    Args:
        clip: The largest norm of a reply: one number for every exchange, or one for each by the
            name of the client's method (`{"improve": 1.0, "measure": 0.5, "evaluation": 0.5}`).
        noise: The standard deviation of the noise in a sum, in units of the clip; a number or by
            name. None to choose it by `epsilon`.
        epsilon: ε, the most that the run may spend; None for no limit.
        delta: δ, below 1/n; None for n^(−1.1), with n clients.
        shares: By name, shares of the budget where the noise is chosen by `epsilon`: the noise of
            an exchange is proportional to 1/√share, and a share that is not given is 1.
        evaluation: `"private"`: objective and constraint in the history are clipped, get noise and
            cost ε, too. `"outside"`: they are exact and not covered, for studies in simulation.
        accountant: `"rdp"` or `"pld"`, which is tighter and slower.
        rounds: The rounds for which the budget must last; None for those of the run.
        participants: The clients of a round for which the noise is planned; None for those of the
            algorithm, from which they must not differ.
        unit: Whom it protects: `"client"`, or `"sample"`, one sample of a client. Then each client
            clips what single samples say and adds noise itself (DP-SGD), and `clip`, `noise` and
            `shares` go by `"gradient"`, `"measure"` (the constraint) and `"evaluation"`.

    Example:
        >>> import fedsolve as fs
        >>> privacy = fs.Private(clip={"improve": 0.5, "evaluation": 1.0}, noise=2.0, delta=1e-5)
        >>> privacy.clip["improve"], privacy.noise
        (0.5, 2.0)
    """

    clip: By = eqx.field(converter=lambda value: _by("clip", value), default=1.0)
    noise: By | None = eqx.field(converter=lambda value: _by("noise", value), default=None)
    epsilon: Scalar | None = eqx.field(converter=optional(scalar("epsilon")), default=None)
    delta: Scalar | None = eqx.field(converter=optional(scalar("delta")), default=None)
    shares: dict[str, Scalar] | None = eqx.field(
        converter=lambda value: _by("shares", value), default=None
    )
    evaluation: str = static("private")
    accountant: str = static("rdp")
    rounds: int | None = static(None)
    participants: int | None = static(None)
    unit: str = static("client")

    def __check_init__(self):
        if self.clip is None:
            raise InvalidInput("Privacy needs a clip, the largest norm of a client's reply.")
        if self.noise is None and self.epsilon is None:
            raise InvalidInput("Privacy needs noise, or an epsilon for which it is chosen.")
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, value)
        if self.delta is not None and float(self.delta) >= 1:
            raise InvalidInput(f"delta must be below 1/n for n clients, got {self.delta}.")
        if self.evaluation not in EVALUATIONS:
            raise InvalidInput(
                f'evaluation must be "private" or "outside", got {self.evaluation!r}.'
            )
        if self.accountant not in ACCOUNTANTS:
            raise InvalidInput(f'accountant must be "rdp" or "pld", got {self.accountant!r}.')
        if self.unit not in UNITS:
            raise InvalidInput(f'unit must be "client" or "sample", got {self.unit!r}.')
        if self.unit == "sample" and self.participants is not None:
            raise InvalidInput(
                "Privacy of samples counts every client as one that takes part: leave out "
                "participants."
            )
        for name in ("rounds", "participants"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    @classmethod
    def for_budget(
        cls,
        epsilon: float | int,
        delta: float | int | None = None,
        rounds: int | None = None,
        participants: int | None = None,
        **others: Any,
    ) -> Private:
        """Return privacy whose noise is chosen so that a run spends at most (ε, δ).

        Args:
            epsilon: ε.
            delta: δ, below 1/n; None for n^(−1.1).
            rounds: The rounds for which the budget must last; None for those of the run.
            participants: The clients of a round; None for those of the algorithm.
            others: Other fields of `Private`: `clip`, `shares`, `evaluation`, `accountant`.

        Returns:
            The privacy. The noise is computed when the run begins.

        Raises:
            InvalidInput: If a value cannot be used.

        Example:
            >>> import fedsolve as fs
            >>> fs.Private.for_budget(4.0, 1e-3, rounds=100, clip=0.5).noise is None
            True
        """
        return cls(epsilon=epsilon, delta=delta, rounds=rounds, participants=participants, **others)

    def plan(
        self,
        problem: Problem,
        algorithm: Algorithm,
        rounds: int,
        evaluate_every: int = 1,
        clients: int | None = None,
    ) -> Plan:
        """Return what this means for a run: its noise, what a round costs, how many rounds fit.

        Args:
            problem: The problem.
            algorithm: The algorithm.
            rounds: The rounds of the run.
            evaluate_every: The rounds between two evaluations.
            clients: The number of clients of a deployment, where it may be known who takes part,
                and every answer leaves its site, in one sum; None for a simulation.

        Returns:
            The plan.

        Raises:
            InvalidInput: If the algorithm is not covered, or the budget allows no round.
        """
        if self.unit == "sample":
            if clients is not None:
                raise InvalidInput(
                    "A deployment's server knows the seed of its clients' noise, so privacy of "
                    'samples is for simulations: take unit="client" with a secure sum.'
                )
            return plan_samples(self, problem, algorithm, rounds, evaluate_every)
        delta = self.delta_for(problem.n if clients is None else clients, "clients")
        if problem.averages_state:
            raise InvalidInput(
                "The state of the loss, which the server averages, is not covered by privacy: give "
                'the problem buffers="frozen".'
            )
        names, record = _releases(self, problem, algorithm, clients)
        if clients is None:
            sampling = _sampling(algorithm, problem, record)
        else:
            names = Counter(exchange.method for exchange in record.exchanges)
            sampling = _all_known(algorithm, clients)
        if self.participants is not None and self.participants != round(sampling.expected):
            raise InvalidInput(
                f"Noise is planned for {self.participants} participants, and a round has "
                f"{sampling.expected:g}."
            )
        quantities = _quantities(problem) if self.evaluation == "private" else 0
        known = set(names) | ({EVALUATION} if quantities else set())
        self.check_names(known)

        def accountant(noise: dict[str, float]) -> Accountant:
            each = {name: z / sampling.sensitivity for name, z in noise.items()}
            one = together([each[name] for name, count in names.items() for _ in range(count)])
            looking = together([each[EVALUATION]] * quantities if quantities else [])
            return Accountant(one, looking, sampling, delta, self.accountant)

        noise, found, affordable = self.settled(known, rounds, evaluate_every, accountant)
        clips = self.clips_of(known)
        rule = NoisySums(clips, noise, _size(sampling), self.evaluation == "private")
        seen: dict[str, float] = {}
        if quantities:
            n = problem.n if clients is None else clients
            seen["objective"] = noise[EVALUATION] * float(clips[EVALUATION]) / n
            if isinstance(problem.constraint, Mean):
                seen["constraint"] = seen["objective"]
        sizes = {exchange.method: _length(exchange.reply) for exchange in record.exchanges}
        evaluations = -(-affordable // evaluate_every) if quantities else 0
        return Plan(rule, Ledger(found, seen), affordable, noise, sampling, sizes, evaluations)

    def settled(
        self,
        known: set[str],
        rounds: int,
        evaluate_every: int,
        accountant: Callable[[dict[str, float]], A],
    ) -> tuple[dict[str, float], A, int]:
        """Return the noise by name, its accountant, and how many of the rounds can be afforded.

        Args:
            known: The names of what gets noise.
            rounds: The rounds of the run.
            evaluate_every: The rounds between two evaluations.
            accountant: Makes the accountant of some noise.
        """
        planned = rounds if self.rounds is None else self.rounds
        if self.noise is not None:
            noise = {name: _of(self.noise, name, "noise") for name in known}
        else:
            shares = self.shares or {}
            parts = {name: 1 / math.sqrt(float(shares.get(name, 1.0))) for name in known}
            evaluations = -(-planned // evaluate_every)

            def cost(scale: float) -> float:
                scaled = {name: scale * part for name, part in parts.items()}
                return accountant(scaled).epsilon(planned, evaluations)

            assert self.epsilon is not None
            scale = least_scale(float(self.epsilon), cost)
            noise = {name: scale * part for name, part in parts.items()}
        found = accountant(noise)
        affordable = rounds
        if self.epsilon is not None:
            budget = float(self.epsilon) * (1 + 1e-9)
            affordable = found.affordable(budget, rounds, lambda r: -(-r // evaluate_every))
            if affordable == 0:
                raise InvalidInput(
                    f"One round costs ε = {found.epsilon(1, 1):.3g}, more than the budget "
                    f"{float(self.epsilon):g}: more noise would do."
                )
        return noise, found, affordable

    def clips_of(self, known: set[str]) -> dict[str, Scalar]:
        """Return the clip of each of these names."""
        return {name: _of(self.clip, name, "clip") for name in known}

    def check_names(self, known: set[str]) -> None:
        """Raise if numbers are given for names that a run does not have."""
        for field in ("clip", "noise", "shares"):
            _check_names(field, getattr(self, field), known)

    def delta_for(self, n: int, kind: str) -> float:
        """Return δ for that many clients or samples."""
        delta = n**-1.1 if self.delta is None else float(self.delta)
        if delta >= 1 / n:
            raise InvalidInput(
                f"delta must be below 1/n = {1 / n:.3g} for {n} {kind}, got {delta:g}: else the "
                "data of one of them may be published as they are."
            )
        return delta


def _length(reply: PyTree) -> int:
    """Return how many numbers an answer has, given its shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(dense, reply)))


def _size(sampling: Sampling) -> float | None:
    return None if sampling.kind == "none" else float(sampling.expected)


def _releases(
    private: Private, problem: Problem, algorithm: Algorithm, clients: int | None = None
) -> tuple[Counter[str], RoundRecord]:
    """Return how many sums of each exchange a round computes; raise if it does more."""
    clips = private.clip if isinstance(private.clip, dict) else {}
    default = None if isinstance(private.clip, dict) else private.clip
    probe = NoisySums(dict(clips), {}, None, False, default)
    shapes = jax.eval_shape(lambda: State.start(problem, algorithm, jax.random.key(0), clients))
    record = record_round(problem, algorithm, shapes, RoundOptions(privacy=probe), clients)
    return Counter(record.releases), record


def _sampling(algorithm: Algorithm, problem: Problem, record: RoundRecord) -> Sampling:
    """Return how the clients of a round are drawn, where that may count as privacy.

    It counts only for uniform draws, made anew in each round, if clients keep nothing between
    rounds: what a client keeps tells in which rounds it took part.
    """
    n = problem.n
    kept = jax.eval_shape(lambda: (algorithm.init_client(problem.start()), problem.init_memory()))
    plain = (
        isinstance(algorithm, Participating)
        and type(algorithm).draw is Participating.draw
        and isinstance(algorithm.weighting, Uniform)
        and not jax.tree.leaves(kept)
    )
    if plain and isinstance(algorithm, Participating):
        chosen = algorithm.selecting
        if isinstance(chosen, Random) and chosen.count < n and record.one_cohort:
            return Sampling("fixed", n, float(chosen.count))
        if isinstance(chosen, Poisson) and record.asks_some:
            return Sampling("poisson", n, float(chosen.rate) * n)
    return _all_known(algorithm, n)


def _all_known(algorithm: Algorithm, n: int) -> Sampling:
    """Return what it means that it may be known who takes part."""
    if isinstance(algorithm, Participating) and algorithm.selecting.size is not None:
        return Sampling("none", n, float(min(algorithm.selecting.size, n)))
    return Sampling("none", n, float(n))


def _quantities(problem: Problem) -> int:
    """Return how many quantities of each client an evaluation has."""

    def one() -> PyTree:
        kept = problem.init_memory()
        memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (problem.n, *jnp.shape(x))), kept)
        return client_values(problem, problem.start(), jax.random.key(0), memory=memory)

    return len(jax.eval_shape(one))


def _by(field: str, value: Any) -> Any:
    """Convert one number, or numbers by the name of an exchange."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        number = scalar(field)(value)
        check_positive(field, number)
        return number
    found = {str(name): scalar(f"{field}.{name}")(each) for name, each in value.items()}
    for name, each in found.items():
        check_positive(f"{field}.{name}", each)
    return found


def _of(value: By, name: str, field: str) -> float:
    """Return the number of an exchange."""
    if not isinstance(value, dict):
        return float(value)
    if name not in value:
        raise InvalidInput(
            f"The exchange {name!r} has no {field}, so what clients answer is not covered: give "
            f"{field}={{{name!r}: ...}}."
        )
    return float(value[name])


def _check_names(field: str, value: Any, known: set[str]) -> None:
    """Raise if numbers are given for exchanges that a run does not have."""
    if isinstance(value, dict) and (others := sorted(value.keys() - known - {EVALUATION})):
        raise InvalidInput(
            f"{field} has {others[0]!r}, and the exchanges are {', '.join(sorted(known))}."
        )
