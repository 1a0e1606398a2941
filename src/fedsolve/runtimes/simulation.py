"""The compiled runtime: clients are a leading axis, rounds are a scan, a run is one program.

The program is compiled once for a problem and an algorithm, whatever the number of rounds, the
seed, or the values of step sizes: it advances a fixed number of slots, each of which holds as many
rounds as it is told and evaluates at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Int, PyTree, UInt32

from fedsolve.algorithms.base import Algorithm
from fedsolve.federation.exchange import Question
from fedsolve.federation.federation import Federation
from fedsolve.federation.options import Setting
from fedsolve.federation.state import State
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.runtimes.blocks import map_clients
from fedsolve.runtimes.evaluation import look
from fedsolve.runtimes.sharding import everywhere, kept
from fedsolve.types import Flags

SLOTS = 100


class Simulation(Federation):
    """A federation inside one compiled program."""

    def _exchange(self, question: Question) -> tuple[PyTree, Flags]:
        cohort, when, arrived = question.cohort, question.when, self._arrived(question)
        rows = self._rows(cohort)
        whole = isinstance(rows, slice)

        def take(leaf: Array) -> Array:
            return leaf if whole else leaf[rows]

        kept: list[bool] = []  # which leaves of the state the method hands back untouched

        def watched(index: Any, samples: Samples, state: PyTree) -> tuple[PyTree, PyTree]:
            moved, reply = question.answer(index, samples, state)
            before, after = jax.tree.leaves(state), jax.tree.leaves(moved)
            kept[:] = [a is b for a, b in zip(before, after, strict=True)]
            return moved, jax.tree.map(jnp.asarray, reply)

        def run(states: PyTree) -> tuple[PyTree, PyTree]:
            data = self._problem.samples, states
            return map_clients(jax.vmap(watched), cohort, data, self._setting, rows=whole)

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
            return new if whole else old.at[rows].set(new)

        old, structure = jax.tree.flatten(self._states)
        new = jax.tree.leaves(moved)
        self._states = structure.unflatten(
            o if same else put(o, n) for o, n, same in zip(old, new, kept, strict=True)
        )
        return values, arrived


def advance(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    spans: Int[Array | np.ndarray, "slots 3"],
    setting: Setting | None = None,
    stopped: Any = False,
) -> tuple[State, dict[str, Any]]:
    """Span by span, runs rounds from start to stop, and evaluates there if told to. Once the rule
    has stopped it, nothing is run any more: entries say `stopped`."""
    setting = Setting() if setting is None else setting
    rule = setting.stop

    def step(state: State) -> tuple[State, dict[str, Any]]:
        state, info = Simulation(problem, state, setting).play(algorithm)
        return kept(state, problem.n, setting.mesh), info

    def look_at(state: State, info: dict[str, Any]) -> dict[str, Any]:
        found = look(problem, algorithm, state, setting)
        if rule is not None:
            found["stopped"] = jnp.asarray(rule(info | found), bool)
        return found

    # One trace serves both the shapes and the program.
    run_step, (_, shapes) = _traced(step, state)
    run_look, found_shapes = _traced(look_at, state, shapes)

    def body(_: Any, carry: tuple) -> tuple:
        return run_step(carry[0])

    def slot(carry: tuple[State, Any], span: Int[Array, "3"]) -> tuple[Any, dict[str, Any]]:
        (state, stopped), (start, stop, wanted) = carry, span
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        state, info = lax.fori_loop(start, jnp.where(stopped, start, stop), body, (state, nothing))
        found = lax.cond(
            (wanted > 0) & ~stopped,
            run_look,
            lambda *_: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), found_shapes),
            state,
            info,
        )
        return (state, stopped | found.get("stopped", False)), info | found

    (state, _), entries = lax.scan(slot, (state, jnp.asarray(stopped)), jnp.asarray(spans))
    return state, everywhere(entries, setting.mesh)


def _traced(function: Callable, *given: PyTree) -> tuple[Callable, PyTree]:
    """The function, traced once for arguments of these shapes; and the shapes of what it gives."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*given)
    run, structure = jaxpr_as_fun(program), jax.tree.structure(shapes)

    def call(*arguments: PyTree) -> PyTree:
        return structure.unflatten(run(*jax.tree.leaves(arguments)))

    return call, shapes


@eqx.filter_jit
def compiled_start(
    problem: Problem, algorithm: Algorithm, seed: UInt32[Array, " words"], setting: Setting
) -> State:
    """The state before the first round, where it belongs."""
    key, timed = jax.random.wrap_key_data(seed), setting.clock is not None
    return kept(State.start(problem, algorithm, key, timed=timed), problem.n, setting.mesh)


compiled_advance = eqx.filter_jit(advance)
