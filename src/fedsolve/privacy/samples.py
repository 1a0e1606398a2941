"""Privacy of samples: a client clips what each of its samples says, and adds noise itself (DP-SGD).

A client answers from its samples by queries alone. A query draws a batch, in which every sample is
with probability q = B/n_j, and returns

    (Σ_{i in batch} clip(v_i, C) + N(0, (z C)² I)) / B,

where v_i is a gradient at one sample, or the value of the constraint there. Whatever the client
computes from its queries is covered: local steps, optimizers, compression, control variates. Two
neighbours differ in one sample of one client, which in one of them counts zero; how many samples a
client has may be known.

| here | Abadi et al. | |
|---|---|---|
| `clip` | C | of each kind of query: `"gradient"`, `"measure"`, `"evaluation"` |
| `noise` | σ | the same, in units of the clip |
| `batch_size` of the problem | L | the expected size B; None for all samples |

The mechanism is that of Abadi et al., "Deep Learning with Differential Privacy" (2016), Algorithm
1. `fedsolve.privacy.sample_plan` counts the queries of a round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NoReturn, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32
from scipy.stats import poisson

from fedsolve.compression.clipping import limit
from fedsolve.errors import InvalidInput
from fedsolve.federation.rules import EVALUATION
from fedsolve.fields import Scalar
from fedsolve.problem.client import Client
from fedsolve.problem.constraints import Mean
from fedsolve.problem.padding import PerClient
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.types import Number, PRNGKey, PyTree, Vector

GRADIENT, MEASURE = "gradient", "measure"
KINDS = GRADIENT, MEASURE, EVALUATION
MARK = "fedsolve_noise_of_"  # begins the name of the part of a program that draws a query's noise
TRUNCATED = 1e-15  # probability that a batch has more samples than there is room for
NOISE, ROWS = 2**31 - 5, 2**31 - 6  # folded into a query's key

Said = Float[Array, " size"]  # what a sample says, or a mean of it
Saying = Callable[[Samples], Said]
Weighted = tuple[PerClient, Number | int]  # a function of a client's samples, and its weight


class Terms(eqx.Module):
    """What clients do to what their samples say.

    Args:
        clips: C by kind of query.
        noises: z by kind of query.
        sets: The set of samples that objective and constraint average over; None for the only one.
        evaluation: Whether evaluations are queries as well.
    """

    clips: dict[str, Scalar]
    noises: dict[str, Scalar]
    sets: tuple[str | None, ...] = eqx.field(static=True)
    evaluation: bool = eqx.field(static=True)


class SampleProblem(Problem):
    """A problem whose clients answer by queries alone.

    Args:
        problem: The problem.
        terms: What clients do to what their samples say.
    """

    terms: Terms

    def __init__(self, problem: Problem, terms: Terms):
        for field in dataclasses.fields(problem):
            setattr(self, field.name, getattr(problem, field.name))
        self.terms = terms

    def client(self, *place: PyTree) -> SampleClient:
        return SampleClient(self, *place)

    def values(
        self, w: Vector, samples: Samples, key: PRNGKey | None, kept: PyTree = None
    ) -> dict[str, PyTree]:
        if not self.terms.evaluation:
            return super().values(w, samples, key, kept)
        if key is None:
            raise InvalidInput("An evaluation of private samples needs a key, for its noise.")
        found: dict[str, PyTree] = {}
        for number, (name, function) in enumerate(self.functions().items()):
            own = jax.random.fold_in(key, number)
            query = Query(self, samples, EVALUATION, None, own, w)
            found[name] = query.of_values(w, function)
        return found

    def functions(self) -> dict[str, PerClient]:
        """Return the objective, and the function of the constraint if there is one."""
        found = {"objective": self.objective}
        if isinstance(self.constraint, Mean):
            found["constraint"] = cast(PerClient, self.constraint.function)
        return found


class Query:
    """One query of a client.

    Args:
        problem: The problem.
        samples: The client's samples.
        kind: `"gradient"`, `"measure"` or `"evaluation"`.
        batch: The expected number of samples; None for all.
        key: The query's key. Other questions with the same key get other noise, since the
            difference of two answers with the same noise would tell data.
        w: Where it asks.
        weights: What else tells it from other queries.
    """

    def __init__(
        self,
        problem: SampleProblem,
        samples: Samples,
        kind: str,
        batch: int | None,
        key: PRNGKey,
        w: Vector,
        weights: tuple[Number | int, ...] = (),
    ):
        self._problem, self._samples, self._kind, self._batch = problem, samples, kind, batch
        key = jax.random.fold_in(key, KINDS.index(kind))
        parts = jnp.append(w, jnp.asarray(weights, w.dtype))
        parts = parts.astype(jnp.promote_types(parts.dtype, jnp.float32))
        for word in _digest(lax.bitcast_convert_type(parts, jnp.uint32).ravel()):
            key = jax.random.fold_in(key, word)
        self._key = key

    def of_values(self, w: Vector, function: PerClient) -> Float[Array, ""]:
        """Return the mean of a function's values at single samples."""
        params = self._problem.params_at(w)

        def value(data: Samples) -> Said:
            return jnp.reshape(function(params, data), (1,))

        return self._sums({self._set_of(function): value}, 1, w)[0]

    def of_slopes(self, w: Vector, parts: Sequence[Weighted]) -> Vector:
        """Return the mean of Σ weight·∇function at single samples.

        Where functions average over sets of their own, a sample is in one of the sums only.
        """
        by_set: dict[str | None, list[Weighted]] = {}
        for function, weight in parts:
            by_set.setdefault(self._set_of(function), []).append((function, weight))

        def slope(own: list[Weighted]) -> Callable[[Samples], Said]:
            def of(data: Samples) -> Said:
                total = jnp.zeros_like(w)
                for function, weight in own:
                    found = jax.grad(lambda w, f=function: f(self._problem.params_at(w), data))(w)
                    # a weight of 0 takes out what is not finite, too
                    total += jnp.where(weight == 0, 0, weight * found).astype(w.dtype)
                return total

            return of

        functions = {name: slope(own) for name, own in by_set.items()}
        return self._sums(functions, len(w), w)

    def _sums(
        self, functions: dict[str | None, Callable[[Samples], Said]], size: int, w: Vector
    ) -> Said:
        """Return the sum over sets of the clipped and noisy means of their functions."""
        terms = self._problem.terms
        clip = jnp.asarray(terms.clips[self._kind], w.dtype)
        key = jax.random.fold_in(self._key, NOISE)
        noise = _drawn(self._kind, (len(functions), size))(key).astype(w.dtype)
        noise *= clip * jnp.asarray(terms.noises[self._kind], w.dtype)
        total = jnp.zeros(size, w.dtype)
        for number, (name, function) in enumerate(functions.items()):
            rows, there, expected = self._drawn_rows(name, number)

            def one(row: Array, name: str | None = name, function: Saying = function) -> Said:
                return limit(function(alone(self._samples, name, row, self._key)), clip)

            each = jnp.where(there[:, None], jax.vmap(one)(rows), 0)
            total += (jnp.sum(each, axis=0) + noise[number]) / expected
        return total

    def _drawn_rows(self, name: str | None, number: int) -> tuple[Array, Array, Array]:
        """Return rows of a set, which of them are in the batch, and how many are expected."""
        mask, length = self._samples.mask, length_of(self._samples, name)
        own = mask[name] if isinstance(mask, dict) else mask
        real = jnp.ones(length, bool) if own is None else own
        count = jnp.sum(real)
        if self._batch is None:
            return jnp.arange(length), real, count
        key = jax.random.fold_in(jax.random.fold_in(self._key, ROWS), number)
        chosen = real & (jax.random.uniform(key, (length,)) < self._batch / count)
        room = min(length, int(poisson.isf(TRUNCATED, self._batch)) + 1)
        found = jnp.nonzero(chosen, size=room, fill_value=length)[0]
        there = found < length
        return jnp.where(there, found, 0), there, jnp.minimum(self._batch, count)

    def _set_of(self, function: PerClient) -> str | None:
        where = [function is known for known in self._problem.functions().values()].index(True)
        return self._problem.terms.sets[where]


def alone(samples: Samples, name: str | None, row: Array, key: PRNGKey) -> Samples:
    """Return one sample of a client as if it were all of them.

    Args:
        samples: The client's samples.
        name: The set of samples that it is of; None if there is only one set.
        row: Its row.
        key: A key, for a random loss.
    """
    values = samples.values
    own = jax.tree.map(lambda leaf: leaf[row][None], values if name is None else values[name])
    noise = jax.random.fold_in(jax.random.fold_in(key, NOISE), row)
    return Samples(own if name is None else {**values, name: own}, None, noise=noise)


def length_of(samples: Samples, name: str | None) -> int:
    """Return how many rows a set of a client's samples has."""
    values = samples.values
    return len(jax.tree.leaves(values if name is None else values[name])[0])


class SampleClient(Client):
    """A client whose samples speak through queries alone."""

    def grad(self, w: Vector, key: PRNGKey | None = None) -> Vector:
        return self._slope(w, key, 1, 0)

    def constraint_grad(
        self, w: Vector, *, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Vector:
        return self._slope(w, key, 0, 1)

    def direction(
        self, w: Vector, sigma: Number | int, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Vector:
        if self.unconstrained:
            return self.grad(w, key)
        return self._slope(w, key, 1 - sigma, sigma)

    def penalised(
        self, w: Vector, factor: Number | int, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Vector:
        return self.grad(w, key) if self.unconstrained else self._slope(w, key, 1, factor)

    def measure(self, w: Vector, key: PRNGKey | None = None) -> PyTree:
        function = self._constraint_function
        return self._query(MEASURE, w, key).of_values(w, function)

    def _slope(
        self, w: Vector, key: PRNGKey | None, first: Number | int, other: Number | int
    ) -> Vector:
        parts: list[Weighted] = []
        if not (isinstance(first, int) and first == 0):
            parts.append((self._problem.objective, first))
        if not (isinstance(other, int) and other == 0):
            parts.append((self._constraint_function, other))
        return self._query(GRADIENT, w, key, first, other).of_slopes(w, parts)

    def _query(self, kind: str, w: Vector, key: PRNGKey | None, *weights: Number | int) -> Query:
        own, problem = self.key if key is None else key, self._problem
        assert isinstance(problem, SampleProblem)
        return Query(problem, self._samples, kind, problem.batch_size, own, w, weights)

    @property
    def _constraint_function(self) -> PerClient:
        assert isinstance(self._constraint, Mean)
        return cast(PerClient, self._constraint.function)

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidInput(
            f"Privacy of samples does not cover {what}: take an algorithm of gradients and "
            'constraint values, such as FedAvg or FedSGM with local_steps, or unit="client".'
        )

    def objective(self, w: Vector, key: PRNGKey | None = None) -> Float[Array, ""]:
        self._refuse("a client's loss")

    def constraint(
        self, w: Vector, *, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Float[Array, ""]:
        self._refuse("a client's own value of the constraint")

    def representation(self, w: Vector, key: PRNGKey | None = None) -> NoReturn:
        self._refuse("representations of samples")

    def each_batch(
        self, epochs: int, key: PRNGKey, body: Callable[..., PyTree], start: PyTree
    ) -> NoReturn:
        self._refuse("passes over the samples (local_epochs)")

    def restricted(self, count: Number | int, key: PRNGKey) -> NoReturn:
        self._refuse("contributions of some of a client's samples, as games have them")

    def with_all_samples(self) -> NoReturn:
        self._refuse("what needs all samples of a client, such as its loss")


def _digest(words: UInt32[Array, " n"]) -> tuple[UInt32[Array, ""], UInt32[Array, ""]]:
    """Return two numbers that differ for different words."""
    place = jnp.arange(len(words), dtype=jnp.uint32)
    mixed = words * (2 * place + 1)
    other = (words ^ (words >> 15)) * ((place + 1) * jnp.uint32(2654435761) | 1)
    return jnp.sum(mixed, dtype=jnp.uint32), jnp.sum(other ^ (other >> 13), dtype=jnp.uint32)


@functools.cache
def _drawn(kind: str, shape: tuple[int, int]) -> Callable[[PRNGKey], Float[Array, "sets size"]]:
    """Return what draws the noise of a query, as a part of the program that can be counted."""

    def noise(key: PRNGKey) -> Float[Array, "sets size"]:
        return jax.random.normal(key, shape)

    noise.__name__ = noise.__qualname__ = MARK + kind
    return jax.jit(noise)
