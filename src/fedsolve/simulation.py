"""The compiled runtime: clients are a leading axis, rounds are a scan, a run is one program.

The program is compiled once for a problem and an algorithm, whatever the number of rounds, the
seed, or the values of step sizes: it advances a fixed number of slots, each of which holds as many
rounds as it is told and evaluates at its end.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Float, Int, Key, PyTree

from fedsolve.algorithm import Algorithm
from fedsolve.federation import Arrivals, Cohort, Federation, Flags, Question, State
from fedsolve.problem import Problem
from fedsolve.replies import Replies
from fedsolve.samples import Samples
from fedsolve.stopping import Stop, wants_gradient

SLOTS = 100
TOGETHER = 2**25  # bytes: so much of clients' data is worked on in one piece,
BLOCK = 2**22  # and of more than that only so much at a time (benchmarks/fedadmm_scale.py)

Follow = tuple[tuple[str, Callable], ...]  # names, and functions of (problem, params)


class Simulation(Federation):
    """A federation inside one compiled program."""

    def __init__(
        self,
        problem: Problem,
        state: State,
        arrivals: Arrivals | None = None,
        clients_at_once: int | None = None,
    ):
        super().__init__(problem, state, arrivals)
        self._at_once = clients_at_once

    def _exchange(self, question: Question) -> tuple[PyTree, Flags]:
        cohort, when, arrived = question.cohort, question.when, self._arrived(question)
        everyone = isinstance(cohort, np.ndarray) and len(cohort) == self.clients

        def take(leaf: Array) -> Array:
            return leaf if everyone else leaf[cohort]

        kept: list[bool] = []  # which leaves of the state the method hands back untouched

        def watched(index: Any, samples: Samples, state: PyTree) -> tuple[PyTree, PyTree]:
            moved, reply = question.answer(index, samples, state)
            before, after = jax.tree.leaves(state), jax.tree.leaves(moved)
            kept[:] = [a is b for a, b in zip(before, after, strict=True)]
            return moved, jax.tree.map(jnp.asarray, reply)

        def run(states: PyTree) -> tuple[PyTree, PyTree]:
            return map_clients(watched, cohort, (self._problem.samples, states), self._at_once)

        if isinstance(when, jax.Array):
            # Not asked, not computed: worth a branch, since it can be most of a round.
            shape = jax.eval_shape(run, self._states)

            def skip(states: PyTree) -> tuple[PyTree, PyTree]:
                zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape[1])
                return jax.tree.map(take, states), zeros

            moved, values = lax.cond(jnp.any(when), run, skip, self._states)
        else:
            moved, values = run(self._states)

        def put(old: Array, new: Array) -> Array:
            if not (isinstance(arrived, np.ndarray) and arrived.all()):
                new = jnp.where(arrived.reshape(-1, *[1] * (new.ndim - 1)), new, take(old))
            return new if everyone else old.at[cohort].set(new)

        old, structure = jax.tree.flatten(self._states)
        new = jax.tree.leaves(moved)
        self._states = structure.unflatten(
            o if same else put(o, n) for o, n, same in zip(old, new, kept, strict=True)
        )
        return values, arrived


def map_clients(function: Callable, cohort: Cohort, data: PyTree, at_once: int | None) -> PyTree:
    """`function(index, *client's data)` of a cohort: all in one `vmap`, or `at_once` at a time.

    A block's data are fetched where they are used, so that what a client does with them more than
    once finds them in the processor's cache, and no copy of the cohort's data is made. Where
    nothing is said, that is done for data too large for the cache.
    """
    if at_once is None:
        at_once = _block(data, len(cohort))
    if at_once is not None:

        def one(index: Any) -> PyTree:
            return function(index, *jax.tree.map(lambda leaf: leaf[index], data))

        return lax.map(one, jnp.asarray(cohort), batch_size=at_once)
    clients = jax.tree.leaves(data)[0].shape[0]
    if not (isinstance(cohort, np.ndarray) and len(cohort) == clients):
        data = jax.tree.map(lambda leaf: leaf[cohort], data)
    return jax.vmap(function)(jnp.asarray(cohort), *data)


def _block(data: PyTree, cohort: int) -> int | None:
    """How many clients fit into the cache; None where the whole cohort does."""
    leaves = jax.tree.leaves(data)
    each = sum(leaf.size * leaf.dtype.itemsize // leaf.shape[0] for leaf in leaves)
    if jax.default_backend() != "cpu" or each * cohort <= TOGETHER:
        return None
    return max(BLOCK // each, 1)


def client_values(
    problem: Problem,
    w: Float[Array, " d"],
    key: Key[Array, ""] | None = None,
    first: Any = 0,
    at_once: int | None = None,
    gradient: bool = False,
) -> dict[str, PyTree]:
    """`problem.values` of each client, where the clients are numbered from `first` on; and
    the gradient of its objective, if asked for."""

    def look(index: Any, samples: Samples) -> dict[str, PyTree]:
        own = None if key is None else jax.random.fold_in(key, index)

        def values(w: Float[Array, " d"]) -> tuple[Float[Array, ""], dict[str, PyTree]]:
            found = problem.values(w, samples, own)
            return found["objective"], found

        if not gradient:
            return values(w)[1]
        slope, found = jax.grad(values, has_aux=True)(w)
        return found | {"gradient": slope}

    def numbered(index: Any, samples: Samples) -> dict[str, PyTree]:
        return look(first + index, samples)

    everyone = np.arange(problem.n, dtype=np.int32)
    return map_clients(numbered, everyone, (problem.samples,), at_once)


def evaluate(
    problem: Problem,
    w: Float[Array, " d"],
    key: Key[Array, ""] | None = None,
    at_once: int | None = None,
    gradient: bool = False,
    follow: Follow = (),
) -> dict[str, Any]:
    """f (and ‖∇f‖², if asked for) and g over all clients, the metrics, and what else is to be
    followed, at w."""
    values = client_values(problem, w, key, at_once=at_once, gradient=gradient)
    found = combined(problem, w, values)
    for name, diagnostic in follow:
        told = diagnostic(problem, problem.layout.unravel(w))
        for path, leaf in jax.tree.leaves_with_path(told):
            part = jax.tree_util.keystr(path, simple=True, separator=".")
            found[f"{name}.{part}" if part else name] = jnp.asarray(leaf)
    return found


def prepared(function: Callable, *fixed: PyTree) -> Callable:
    """`function(*fixed, *arguments)` compiled, for many short calls: what is fixed is taken apart
    once, where `eqx.filter_jit` would do so in each."""
    arrays, rest = eqx.partition(fixed, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)

    @jax.jit
    def program(leaves: list[Array], *arguments: PyTree) -> PyTree:
        whole = eqx.combine(jax.tree.unflatten(structure, leaves), rest)
        return function(*whole, *arguments)

    return functools.partial(program, leaves)


def combined(problem: Problem, w: Float[Array, " d"], values: dict[str, PyTree]) -> dict[str, Any]:
    """f and g from clients' values at w, and the metrics there."""
    found = {k: jnp.mean(v) for k, v in values.items() if k not in ("constraint", "gradient")}
    if "gradient" in values:
        found["squared_gradient"] = jnp.sum(jnp.mean(values["gradient"], axis=0) ** 2)
    if problem.constraint is not None:
        heard = Replies(values["constraint"], np.ones(len(values["objective"]), bool))
        found["constraint"], _ = problem.constraint.combine(heard)
    params = problem.layout.unravel(w)
    return found | {name: metric(params, problem.test) for name, metric in problem.metrics}


def advance(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    spans: Int[Array | np.ndarray, "slots 3"],
    arrivals: Arrivals | None = None,
    at_once: int | None = None,
    rule: Stop | None = None,
    stopped: Any = False,
    follow: Follow = (),
) -> tuple[State, dict[str, Any]]:
    """Span by span, runs rounds from start to stop, and evaluates there if told to. Once the rule
    has stopped it, nothing is run any more: entries say `stopped`."""

    def step(state: State) -> tuple[State, dict[str, Any]]:
        return Simulation(problem, state, arrivals, at_once).play(algorithm)

    # One trace serves both the shapes and the loop.
    traced, (_, shapes) = jax.make_jaxpr(step, return_shape=True)(state)
    run_step = jaxpr_as_fun(traced)
    structure = jax.tree.structure((state, shapes))

    def body(_: Any, carry: tuple) -> tuple:
        return structure.unflatten(run_step(*jax.tree.leaves(carry[0])))

    def look_at(state: State, info: dict[str, Any]) -> dict[str, Any]:
        gradient = wants_gradient(rule)
        found = evaluate(problem, state.w, state.evaluation_key, at_once, gradient, follow)
        if rule is not None:
            found["stopped"] = jnp.asarray(rule(info | found), bool)
        return found

    def slot(carry: tuple[State, Any], span: Int[Array, "3"]) -> tuple[Any, dict[str, Any]]:
        (state, stopped), (start, stop, look) = carry, span
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        state, info = lax.fori_loop(start, jnp.where(stopped, start, stop), body, (state, nothing))
        found_shapes = jax.eval_shape(look_at, state, info)
        found = lax.cond(
            (look > 0) & ~stopped,
            look_at,
            lambda *_: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), found_shapes),
            state,
            info,
        )
        return (state, stopped | found.get("stopped", False)), info | found

    (state, _), entries = lax.scan(slot, (state, jnp.asarray(stopped)), jnp.asarray(spans))
    return state, entries


compiled_start = eqx.filter_jit(State.start)
compiled_advance = eqx.filter_jit(advance)


def keep_compiled_programs(folder: Path) -> None:
    """Lets this process keep its compiled programs there, and find those of earlier ones. A user
    who chose a folder by JAX's own setting keeps it."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    with contextlib.suppress(OSError):  # no place for them: compile every time
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
