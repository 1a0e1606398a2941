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
from jaxtyping import Array, Float, Int, Key, PyTree, UInt32

from fedsolve.algorithm import Algorithm
from fedsolve.constraints import Mean
from fedsolve.devices import everywhere, kept
from fedsolve.federation import Federation, Flags, Question, State
from fedsolve.mapping import map_clients
from fedsolve.packets import weighted_sum
from fedsolve.problem import Problem
from fedsolve.replies import Replies
from fedsolve.samples import Samples
from fedsolve.setting import Setting
from fedsolve.stopping import wants_gradient

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


def client_values(
    problem: Problem,
    w: Float[Array, " d"],
    key: Key[Array, ""] | None = None,
    first: Any = 0,
    setting: Setting | None = None,
    gradient: bool = False,
) -> dict[str, PyTree]:
    """`problem.values` of each client, where the clients are numbered from `first` on. If asked
    for, `gradient` has sums of gradients of their objectives, one row a block of clients: so that
    there is none for each client."""

    def look(w: Float[Array, " d"], index: Any, samples: Samples) -> dict[str, PyTree]:
        own = None if key is None else jax.random.fold_in(key, first + index)
        return problem.values(w, samples, own)

    def together(indices: Int[Array, " b"], samples: Samples) -> dict[str, PyTree]:
        def total(w: Float[Array, " d"]) -> tuple[Float[Array, ""], dict[str, PyTree]]:
            found = jax.vmap(look, in_axes=(None, 0, 0))(w, indices, samples)
            return jnp.sum(jnp.where(indices < problem.n, found["objective"], 0)), found

        if not gradient:
            return total(w)[1]
        slope, found = jax.grad(total, has_aux=True)(w)
        return found | {"gradient": slope[None]}

    everyone = np.arange(problem.n, dtype=np.int32)
    return map_clients(together, everyone, (problem.samples,), setting or Setting())


def evaluate(
    problem: Problem,
    w: Float[Array, " d"],
    key: Key[Array, ""] | None = None,
    setting: Setting | None = None,
    shares: Float[Array, " n"] | None = None,
) -> dict[str, Any]:
    """f (and ‖∇f‖², if the rule asks for it) and g over all clients, the metrics, and what else is
    to be followed, at w."""
    setting = Setting() if setting is None else setting
    values = client_values(problem, w, key, setting=setting, gradient=wants_gradient(setting.stop))
    found = combined(problem, w, values, shares)
    for name, diagnostic in setting.follow:
        told = diagnostic(problem, problem.layout.unravel(w))
        for path, leaf in jax.tree.leaves_with_path(told):
            part = jax.tree_util.keystr(path, simple=True, separator=".")
            found[f"{name}.{part}" if part else name] = jnp.asarray(leaf)
    return found


def look(problem: Problem, algorithm: Algorithm, state: State, setting: Setting) -> dict[str, Any]:
    """`evaluate` after a round, and what clients hold back there."""
    shares = algorithm.objective_weights(state.server, state.participation)
    found = evaluate(problem, state.w, state.evaluation_key, setting, shares)
    error = algorithm.uplink_error(state.clients, state.w, state.round)
    return found if error is None else found | {"uplink_error": error}


def combined(
    problem: Problem,
    w: Float[Array, " d"],
    values: dict[str, PyTree],
    shares: Float[Array, " n"] | None = None,
) -> dict[str, Any]:
    """f and g from clients' values at w, and the metrics there; with `shares` also the f (and the
    g, where it is a mean) in which clients count by these."""
    found = {k: jnp.mean(v) for k, v in values.items() if k not in ("constraint", "gradient")}
    if "gradient" in values:
        parts = values["gradient"]  # of some clients together each
        slope = weighted_sum(jnp.full(len(parts), 1 / len(values["objective"])), parts)
        found["squared_gradient"] = jnp.sum(slope**2)
    if problem.constraint is not None:
        heard = Replies(values["constraint"], np.ones(len(values["objective"]), bool))
        found["constraint"], _ = problem.constraint.combine(heard)
    if shares is not None:
        each = {k: values[k] for k in ("objective", "constraint") if k in values}
        if not isinstance(problem.constraint, Mean):
            each.pop("constraint", None)
        total = jnp.sum(shares)  # of those that were heard
        found |= {f"weighted_{k}": jnp.sum(shares * v) / total for k, v in each.items()}
    params = problem.layout.unravel(w)
    return found | {name: metric(params, problem.test) for name, metric in problem.metrics}


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
