"""What privacy of samples means for a run: its queries are counted, and what they cost.

How many queries a round has is counted in the program of the round: each draws its noise in a part
that has a name. `fedsolve.privacy.samples` has the queries.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.exchange import Exchange
from fedsolve.federation.rules import EVALUATION
from fedsolve.federation.state import State
from fedsolve.privacy.accounting import (
    Accountant,
    Curve,
    Ledger,
    Sampling,
    curve,
    package,
    together,
)
from fedsolve.privacy.plan import NoisySums, Plan
from fedsolve.privacy.samples import GRADIENT, MARK, MEASURE, SampleProblem, Terms, alone, length_of
from fedsolve.problem.constraints import Mean
from fedsolve.problem.padding import PerClient, per_client
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples, is_pieces
from fedsolve.runtimes.recording import Recorder
from fedsolve.types import Cohort, Flags, PyTree, Reply

if TYPE_CHECKING:
    from fedsolve.privacy.private import Private

Counts = dict[str, int]  # queries by kind
UNCOUNTED = (
    "How many queries a round has is not known before it is played, so its privacy cannot be "
    "accounted for: give local_steps a fixed number."
)


def queries_in(jaxpr: core.Jaxpr) -> Counts:
    """Return how many queries of each kind a program has.

    Raises:
        InvalidInput: If queries are in a part of which it is not known how often it is run.
    """
    found: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        kind, params = equation.primitive.name, equation.params
        name = str(params.get("name", ""))
        if kind in ("jit", "pjit") and name.startswith(MARK):
            if len(getattr(equation.outvars[0].aval, "shape", ())) != 2:
                raise InvalidInput(UNCOUNTED)
            found[name.removeprefix(MARK)] += 1
            continue
        inner = [queries_in(part) for part in _parts(params)]
        if kind == "cond":
            for each in set().union(*inner):
                found[each] += max(part.get(each, 0) for part in inner)
        elif any(inner):
            if kind not in ("scan", "jit", "pjit", "closed_call", "remat2", "checkpoint"):
                raise InvalidInput(UNCOUNTED)
            times = params["length"] if kind == "scan" else 1
            for part in inner:
                for each, count in part.items():
                    found[each] += times * count
    return dict(found)


def _parts(params: dict[str, PyTree]) -> list[core.Jaxpr]:
    """Return the programs among an equation's parameters."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr))
    closed = [leaf.jaxpr for leaf in leaves if isinstance(leaf, core.ClosedJaxpr)]
    return closed + [leaf for leaf in leaves if isinstance(leaf, core.Jaxpr)]


class _Counting(Recorder):
    """A federation without clients, that counts the queries of each exchange."""

    counts: Counter[str]

    def _deliver(self, exchange: Exchange, cohort: Cohort, asked: Flags) -> tuple[Reply, Flags]:
        one = jax.tree.map(lambda leaf: leaf[0], (self._problem.samples, self._states))
        program = jax.make_jaxpr(exchange.answer)(jnp.int32(0), *one)
        self.counts.update(queries_in(program.jaxpr))
        return super()._deliver(exchange, cohort, asked)


def count_queries(problem: SampleProblem, algorithm: Algorithm) -> Counts:
    """Return how many queries of each kind a client answers in a round, at most."""
    counts: Counter[str] = Counter()

    def trace(problem: Problem, algorithm: Algorithm, state: State) -> None:
        recorder = _Counting(problem, state)
        recorder.counts = counts
        recorder.play(algorithm)

    state = jax.eval_shape(lambda: State.start(problem, algorithm, jax.random.key(0)))
    eqx.filter_eval_shape(trace, problem, algorithm, state)
    return dict(counts)


@dataclasses.dataclass(frozen=True)
class SampleAccountant(Accountant):
    """What rounds and evaluations cost the client with the fewest samples.

    Args:
        queries: The multiplier z and the number of the queries of a round, by kind.
    """

    queries: tuple[tuple[float, int], ...] = ()

    @property
    def _round_curve(self) -> Curve:
        if "round" not in self._curves:
            each = [count * curve(z, self.sampling) for z, count in self.queries]
            self._curves["round"] = np.sum(each, axis=0)
        return self._curves["round"]

    def _by_distributions(self, rounds: int, evaluations: int) -> float:
        accounting = package()
        accountant = accounting.pld.PLDAccountant()
        rate = self.sampling.expected / self.sampling.clients
        for z, count in self.queries:
            event = accounting.GaussianDpEvent(z)
            if rate < 1:
                event = accounting.PoissonSampledDpEvent(rate, event)
            accountant.compose(event, rounds * count)
        if evaluations and math.isfinite(self.evaluation):
            accountant.compose(accounting.GaussianDpEvent(self.evaluation), evaluations)
        return float(accountant.get_epsilon(self.delta))


@dataclasses.dataclass(frozen=True)
class SamplePlan(Plan):
    """What privacy of samples means for one run.

    Args:
        problem: The problem whose clients answer by queries.
        queries: How many queries of each kind a client answers in a round.
    """

    problem: SampleProblem | None = None
    queries: Counts = dataclasses.field(default_factory=dict)

    @property
    def applied(self) -> None:
        return None

    def problem_of(self, problem: Problem) -> Problem:
        return problem if self.problem is None else self.problem

    def deviation(self, name: str) -> float:
        """Return the standard deviation of the noise in each number of a client's query.

        Args:
            name: The kind of query, such as `"gradient"`.
        """
        return self.noise[name] * float(self.rule.clips[name]) / self.sampling.expected

    def sentences(self) -> list[str]:
        accountant = self.ledger.accountant
        epsilon = accountant.epsilon(self.rounds, self.evaluations)
        smallest = self.sampling.clients
        clips = "; ".join(f"{name} {float(clip):g}" for name, clip in self.rule.clips.items())
        return [
            f"Private for each sample of a client: ε = {epsilon:.3g} after {self.rounds} rounds at "
            f"the client with the fewest ({smallest}) of them, δ = {accountant.delta:.3g}.",
            f"Norm of what a sample says, at most: {clips}.",
        ]

    def warning(self) -> str:
        return ""


def plan_samples(
    private: Private, problem: Problem, algorithm: Algorithm, rounds: int, evaluate_every: int
) -> SamplePlan:
    """Return what privacy of samples means for a run; see `Private.plan`."""
    sets = _sets(problem)
    counted = _counts(problem, set(sets))
    every = sum(int(np.sum(_counts(problem, {name}))) for name in set(sets))
    delta = private.delta_for(every, "samples")
    kinds = {GRADIENT: 1.0, MEASURE: 1.0, EVALUATION: 1.0}
    probe = SampleProblem(problem, Terms(dict(kinds), dict(kinds), sets, False))
    queries = count_queries(probe, algorithm)
    quantities = len(sets) if private.evaluation == "private" else 0
    known = set(queries) | ({EVALUATION} if quantities else set())
    private.check_names(known)
    fewest = int(np.min(counted))
    batch = fewest if problem.batch_size is None else min(problem.batch_size, fewest)
    sampling = Sampling("poisson", fewest, float(batch))

    def accountant(noise: dict[str, float]) -> SampleAccountant:
        each = tuple((noise[name], count) for name, count in sorted(queries.items()))
        all_of_round = together([z for z, count in each for _ in range(count)])
        looking = together([noise[EVALUATION]] * quantities if quantities else [])
        kind = private.accountant
        return SampleAccountant(all_of_round, looking, sampling, delta, kind, queries=each)

    noise, found, affordable = private.settled(known, rounds, evaluate_every, accountant)
    clips = private.clips_of(known)
    terms = Terms(clips, dict(noise), sets, bool(quantities))
    seen: dict[str, float] = {}
    if quantities:
        sizes = [_counts(problem, {name}) for name in sets]
        scale = noise[EVALUATION] * float(clips[EVALUATION])
        each = [scale * math.sqrt(np.sum(1.0 / own**2)) / problem.n for own in sizes]
        seen = dict(zip(probe.functions(), each, strict=True))
    return SamplePlan(
        NoisySums(clips, noise),
        Ledger(found, seen),
        affordable,
        noise,
        sampling,
        evaluations=-(-affordable // evaluate_every) if quantities else 0,
        problem=SampleProblem(problem, terms),
        queries=queries,
    )


def _sets(problem: Problem) -> tuple[str | None, ...]:
    """Return the set of samples of each function; raise where samples are not covered."""
    if problem.keeps_own or problem.state is not None or problem.trains_itself:
        raise InvalidInput(
            "Privacy of samples is for models of parameters alone: it does not cover personal "
            "parameters, a state of the loss, or an objective with a training loop of its own."
        )
    if type(problem) is not Problem or problem.samples.order is not None:
        raise InvalidInput(
            f"Privacy of samples does not cover clients of a {type(problem).__name__}, which do "
            "more with their samples than average a loss over them."
        )
    constraint = problem.constraint
    if constraint is not None and type(constraint) is not Mean:
        raise InvalidInput(
            f"Privacy of samples does not cover {type(constraint).__name__} constraints, which are "
            'no means over samples: use a constraint that is one, or unit="client".'
        )
    values, masks = problem.samples.values, problem.samples.mask
    if any(map(is_pieces, jax.tree.leaves(values, is_leaf=is_pieces))):
        raise InvalidInput("Privacy of samples does not cover samples that are cut into pieces.")
    one_set = _lengths(values)
    functions = {"objective": problem.objective}
    if constraint is not None:
        functions["constraint"] = cast(PerClient, constraint.function)
    if not isinstance(masks, dict) and len(one_set) == 1 and 0 not in one_set:
        found: tuple[str | None, ...] = (None,) * len(functions)
    else:
        if not isinstance(values, dict) or any(
            len(own := _lengths(each)) != 1 or 0 in own for each in values.values()
        ):
            raise InvalidInput(
                "Privacy of samples covers entries with one row for each sample, and a client has "
                "entries of another form beside them."
            )
        found = tuple(_set_of(name, each, problem) for name, each in functions.items())
    for (name, function), own in zip(functions.items(), found, strict=True):
        _check_mean(name, function, own, problem)
    return found


def _lengths(values: PyTree) -> set[int]:
    """Return how many rows a client's entries have; 0 for those without rows."""
    return {np.shape(leaf)[1] if np.ndim(leaf) > 1 else 0 for leaf in jax.tree.leaves(values)}


def _set_of(name: str, function: PerClient, problem: Problem) -> str:
    """Return the set of samples that a function averages over."""
    known, values = function, problem.samples.values
    if problem.samples.mask is None:
        masks = {
            each: np.ones(np.shape(jax.tree.leaves(own)[0])[:2], bool)
            for each, own in values.items()
        }
        known = per_client(name, function.function, problem.params, Samples(values, masks))
    if known.averages is None:
        raise InvalidInput(
            f"The {name} uses several sets of samples at once, which privacy of samples does not "
            "cover: let it be a mean over one of them."
        )
    return known.averages


def _check_mean(name: str, function: PerClient, own: str | None, problem: Problem) -> None:
    """Raise if a function is not the mean of its values at single samples."""
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), problem.samples)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(x + 0.1 * rng.standard_normal(x.shape)) if eqx.is_array(x) else x,
        jax.tree.map(lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x, problem.params),
    )
    if function.is_random:
        return  # its value at one sample depends on the key
    mask = one.mask[own] if isinstance(one.mask, dict) and own else one.mask
    rows = np.arange(length_of(one, own))
    rows, key = jnp.asarray(rows if mask is None else rows[np.asarray(mask)]), jax.random.key(0)
    each = jax.vmap(lambda row: function(params, alone(one, own, row, key)))(rows)
    if not np.allclose(jnp.mean(each), function(params, one), rtol=1e-3, atol=1e-5):
        raise InvalidInput(
            f"The {name} is not a mean over samples, which privacy of samples must clip one by one."
        )


def _counts(problem: Problem, sets: set[str | None]) -> np.ndarray:
    """Return how many samples each client has, in the smallest of these sets."""
    samples, each = problem.samples, []
    for name in sets:
        mask: PyTree = (
            samples.mask[name] if isinstance(samples.mask, dict) and name else samples.mask
        )
        own = samples.values if name is None else samples.values[name]
        shape = np.shape(jax.tree.leaves(own)[0])[:2]
        each.append(np.full(shape[0], shape[1]) if mask is None else np.sum(mask, axis=1))
    return np.min(each, axis=0)
