"""The compiled runtime: clients are a leading axis, rounds are a scan, a run is one program.

The program is compiled once for a problem and an algorithm, whatever the number of rounds, the
seed, or the values of step sizes: it advances a fixed number of slots, each of which holds as many
rounds as it is told and evaluates at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, PyTree, UInt32

from fedsolve.algorithm import Algorithm
from fedsolve.devices import everywhere, kept, shared
from fedsolve.federation import Cohort, Federation, Flags, Question, State
from fedsolve.problem import Problem
from fedsolve.replies import Replies
from fedsolve.samples import Samples
from fedsolve.setting import Setting
from fedsolve.stopping import wants_gradient

SLOTS = 100
TOGETHER = 2**25  # bytes: so much of clients' data is worked on in one piece,
BLOCK = 2**22  # and of more than that only so much at a time (benchmarks/fedadmm_scale.py)


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


def map_clients(
    together: Callable, cohort: Cohort, data: PyTree, setting: Setting, rows: bool = False
) -> PyTree:
    """`together(indices, *their data)`, mostly a `vmap`, of a cohort: of all in one piece, or of so
    many at a time, and on each device of its part; what it finds is joined on the leading axis.
    With `rows`, the data are the cohort's own and not all clients'.

    A block's data are fetched where they are used, so that what a client does with them more than
    once finds them in the processor's cache, and no copy of the cohort's data is made. Where
    nothing is said, that is done for data too large for the cache.
    """
    clients = jax.tree.leaves(data)[0].shape[0]
    rows = rows or (isinstance(cohort, np.ndarray) and len(cohort) == clients)
    if setting.mesh is not None:
        at_once = setting.clients_at_once or _block(data, len(cohort))
        if not rows and at_once is not None and clients % setting.mesh.size == 0:
            return _where_they_are(together, jnp.asarray(cohort), data, at_once, setting.mesh)
        return _on_each_device(together, cohort, data, setting, rows)
    at_once = setting.clients_at_once
    if at_once is None:
        at_once = _block(data, len(cohort))
    who = jnp.asarray(cohort)
    if at_once is None and rows:
        return together(who, *data)

    def some(who: Array, places: Array) -> PyTree:
        return together(who, *jax.tree.map(lambda leaf: leaf[places], data))

    both = who, jnp.arange(len(who)) if rows else who
    if at_once is None or at_once >= len(who):
        return some(*both)
    blocks = len(who) // at_once
    most = blocks * at_once
    found = lax.map(lambda b: some(*b), [x[:most].reshape(blocks, at_once) for x in both])
    found = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), found)
    if most == len(who):
        return found
    last = some(*(x[most:] for x in both))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), found, last)


def _on_each_device(
    together: Callable, cohort: Cohort, data: PyTree, setting: Setting, rows: bool
) -> PyTree:
    """An equal part of the cohort on each device. The last client fills up the last part, under a
    number that no client has."""
    mesh, count = setting.mesh, len(cohort)
    assert mesh is not None
    places = np.minimum(np.arange(count + -count % mesh.size), count - 1)
    who = jnp.asarray(cohort)[places]
    found = places if rows else who
    who = jnp.where(np.arange(len(places)) < count, who, np.iinfo(np.int32).max)
    if not rows or len(places) > count:
        data = jax.tree.map(lambda leaf: leaf[found], data)
    alone = dataclasses.replace(setting, mesh=None)

    def part(who: Any, data: PyTree) -> PyTree:
        return map_clients(together, who, data, alone, rows=True)

    def parts(leaf: Array) -> Array:
        return leaf.reshape(mesh.size, -1, *leaf.shape[1:])

    each = jax.vmap(part)(*shared(jax.tree.map(parts, (who, data)), mesh))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:count], shared(each, mesh))


def _where_they_are(
    together: Callable, cohort: Array, data: PyTree, at_once: int, mesh: Mesh
) -> PyTree:
    """Each client of a cohort on the device that has its data: large data stay where they are. All
    devices make as many blocks as the one with most clients of the cohort."""
    devices, count = mesh.size, len(cohort)
    parts = jax.tree.map(lambda leaf: leaf.reshape(devices, -1, *leaf.shape[1:]), data)
    each = jax.tree.leaves(parts)[0].shape[1]
    device = np.arange(devices)
    owned = cohort // each == device[:, None]
    owners = owned.sum(axis=1)
    own_first = jnp.argsort(~owned, axis=1, stable=True)  # places in the cohort
    own_first = jnp.pad(own_first, ((0, 0), (0, at_once)), constant_values=count)

    def some(device: Any, places: Array, real: Array, data: PyTree) -> PyTree:
        who = cohort[jnp.minimum(places, count - 1)]
        rows = jnp.where(real, who - device * each, 0)
        return together(who, *jax.tree.map(lambda leaf: leaf[rows], data))

    def block(number: Any, found: PyTree) -> PyTree:
        def one(device: Any, places: Array, owners: Any, data: PyTree, found: PyTree) -> PyTree:
            first = number * at_once
            places = lax.dynamic_slice_in_dim(places, first, at_once)
            real = first + np.arange(at_once) < owners
            new, at = some(device, places, real, data), jnp.where(real, places, count)
            return jax.tree.map(lambda all, new: all.at[at].set(new), found, new)

        return shared(jax.vmap(one)(device, own_first, owners, parts, found), mesh)

    shape = jax.eval_shape(
        some, 0, own_first[0, :at_once], own_first[0, :at_once] < count, _first(parts)
    )
    nothing = jax.tree.map(lambda s: jnp.zeros((devices, count + 1, *s.shape[1:]), s.dtype), shape)
    parts = shared(parts, mesh)
    blocks = -(-jnp.max(owners) // at_once)
    found = lax.fori_loop(0, blocks, block, shared(nothing, mesh))
    return jax.tree.map(lambda leaf: leaf[cohort // each, np.arange(count)], found)


def _first(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


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
) -> dict[str, Any]:
    """f (and ‖∇f‖², if the rule asks for it) and g over all clients, the metrics, and what else is
    to be followed, at w."""
    setting = Setting() if setting is None else setting
    values = client_values(problem, w, key, setting=setting, gradient=wants_gradient(setting.stop))
    found = combined(problem, w, values)
    for name, diagnostic in setting.follow:
        told = diagnostic(problem, problem.layout.unravel(w))
        for path, leaf in jax.tree.leaves_with_path(told):
            part = jax.tree_util.keystr(path, simple=True, separator=".")
            found[f"{name}.{part}" if part else name] = jnp.asarray(leaf)
    return found


class _Fixed:
    """What a program is made for. Its hash is computed once, as it is asked for at every call."""

    def __init__(self, *parts: Any):
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Fixed) and self.parts == other.parts)


@functools.partial(jax.jit, static_argnums=0)
def _program(fixed: _Fixed, arrays: list[Array], *arguments: PyTree) -> PyTree:
    function, structure, others, places = fixed.parts
    leaves = list(others)
    for place, array in zip(places, arrays, strict=True):
        leaves[place] = array
    return function(*jax.tree.unflatten(structure, leaves), *arguments)


def prepared(function: Callable, *fixed: PyTree) -> Callable:
    """`function(*fixed, *arguments)` compiled, for many short calls: what is fixed is taken apart
    once, where `eqx.filter_jit` would do so in each. Arrays in it are arguments of the program."""
    leaves, structure = jax.tree.flatten(fixed)
    places = tuple(i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray))
    others = tuple(None if i in places else x for i, x in enumerate(leaves))
    arrays = [leaves[i] for i in places]
    return functools.partial(_program, _Fixed(function, structure, others, places), arrays)


def combined(problem: Problem, w: Float[Array, " d"], values: dict[str, PyTree]) -> dict[str, Any]:
    """f and g from clients' values at w, and the metrics there."""
    found = {k: jnp.mean(v) for k, v in values.items() if k not in ("constraint", "gradient")}
    if "gradient" in values:
        slope = jnp.sum(values["gradient"], axis=0) / len(values["objective"])
        found["squared_gradient"] = jnp.sum(slope**2)
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

    # One trace serves both the shapes and the loop.
    traced, (_, shapes) = jax.make_jaxpr(step, return_shape=True)(state)
    run_step = jaxpr_as_fun(traced)
    structure = jax.tree.structure((state, shapes))

    def body(_: Any, carry: tuple) -> tuple:
        return structure.unflatten(run_step(*jax.tree.leaves(carry[0])))

    def look_at(state: State, info: dict[str, Any]) -> dict[str, Any]:
        found = evaluate(problem, state.w, state.evaluation_key, setting)
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
    return state, everywhere(entries, setting.mesh)


@eqx.filter_jit
def compiled_start(
    problem: Problem, algorithm: Algorithm, seed: UInt32[Array, " words"], setting: Setting
) -> State:
    """The state before the first round, where it belongs."""
    key, timed = jax.random.wrap_key_data(seed), setting.clock is not None
    return kept(State.start(problem, algorithm, key, timed=timed), problem.n, setting.mesh)


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
