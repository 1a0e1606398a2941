"""The compiled runtime: clients are a leading axis, rounds are a scan, a run is one program.

The program is compiled once for a problem and an algorithm, whatever the number of rounds, the
seed, or the values of step sizes: it advances a fixed number of slots, each of which plays as many
rounds as it is told and evaluates at its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Int

from fedsolve.algorithms.base import Algorithm
from fedsolve.federation.best import with_best
from fedsolve.federation.exchange import Exchange
from fedsolve.federation.federation import Federation
from fedsolve.federation.known import Known, can_be_known
from fedsolve.federation.options import RoundOptions
from fedsolve.federation.state import SeedWords, State
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.runtimes.base import Advanced, Runtime
from fedsolve.runtimes.blocks import block_size, map_clients
from fedsolve.runtimes.chunks import GRID, Spans, milestone, padded
from fedsolve.runtimes.evaluation import GRADIENTS, evaluate_state
from fedsolve.runtimes.history import evaluated, host_history, truncate_at_stop
from fedsolve.runtimes.sharding import copied, everywhere, kept, spread, state_specs
from fedsolve.types import Cohort, Flag, Flags, Function, Info, PyTree, Reply, Round, Vector


class Simulation(Federation):
    """A federation inside one compiled program.

    `known`: the clients' gradients at the w of the last evaluation, for algorithms that begin with
    them; valid as long as nothing was published.
    """

    known: Known | None = None

    def _deliver(self, exchange: Exchange, cohort: Cohort, asked: Flags) -> tuple[Reply, Flags]:
        arrived = self._arrived(exchange, cohort, asked)
        rows = self._rows(cohort)
        whole = isinstance(rows, slice)
        untouched: list[bool] = []  # which leaves of the state the method hands back as they are

        def take(leaf: Array) -> Array:
            return leaf if whole else leaf[rows]

        def answer(
            index: Int[Array, ""],
            samples: Samples | Callable[[Int[Array, ""]], Samples],
            state: PyTree,
            known: Known | None = None,
        ) -> tuple[PyTree, Reply]:
            moved, reply = exchange.answer(index, samples, state, known)
            before, after = jax.tree.leaves(state), jax.tree.leaves(moved)
            untouched[:] = [a is b for a, b in zip(before, after, strict=True)]
            return moved, jax.tree.map(jnp.asarray, reply)

        def informed(index: Int[Array, ""], state: PyTree, slope: Vector) -> tuple[PyTree, Reply]:
            def read(index: Int[Array, ""]) -> Samples:
                return jax.tree.map(lambda leaf: leaf[index], self._problem.samples)

            assert self.known is not None
            return answer(index, read, state, Known(self.known.valid, slope))

        def run(states: PyTree) -> tuple[PyTree, Reply]:
            data = self._problem.samples, states
            if self.known is not None and exchange.w is self._state.w:
                together = self._options.clients_at_once
                if together is None and (block := block_size(data, len(cohort))) is not None:
                    together = min(8 * block, len(cohort))  # data are read in few rounds only
                options = dataclasses.replace(self._options, clients_at_once=together)
                data = states, self.known.gradients
                return map_clients(jax.vmap(informed), cohort, data, options, rows=whole)
            return map_clients(jax.vmap(answer), cohort, data, self._options, rows=whole)

        def put(old: Array, new: Array) -> Array:
            if not (isinstance(arrived, np.ndarray) and arrived.all()):
                new = jnp.where(arrived.reshape(-1, *[1] * (new.ndim - 1)), new, take(old))
            return new if whole else old.at[rows].set(new)

        def move(states: PyTree) -> tuple[PyTree, Reply]:
            moved, values = run(states)
            old, structure = jax.tree.flatten(states)
            new = jax.tree.leaves(moved)
            kept = structure.unflatten(
                o if same else put(o, n) for o, n, same in zip(old, new, untouched, strict=True)
            )
            return kept, values

        if isinstance(asked, jax.Array):
            # Not asked, not computed, and no state is copied: a loop that runs once or not at all.
            shapes = jax.eval_shape(lambda states: run(states)[1], self._states)
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

            def once(carry: PyTree) -> PyTree:
                return jnp.asarray(False), *move(carry[1])

            start = jnp.any(asked), self._states, nothing
            _, self._states, values = lax.while_loop(lambda carry: carry[0], once, start)
        else:
            self._states, values = move(self._states)
        return values, arrived


class Compiled(Runtime):
    """Clients in this process, or over the devices of a mesh, in one compiled program."""

    def start(self, seed: SeedWords) -> State:
        if self.options.mesh is not None:
            seed = copied(seed, self.options.mesh)
        state = compiled_start(self.problem, self.algorithm, seed, self.options)
        return jax.block_until_ready(state)

    def place(self, state: State) -> State:
        if self.options.mesh is None:
            return state
        return spread(state, state_specs(state, self.problem.n, self.options.mesh))

    def advance(self, state: State, spans: Spans) -> Advanced:
        program = self.problem, self.algorithm, state, padded(spans), self.options
        after, entries = compiled_advance(*program)
        spans = evaluated(entries, spans)
        spans, stopped = truncate_at_stop(entries, spans)
        return Advanced(after, host_history(entries, spans), stopped)


def advance(
    problem: Problem,
    algorithm: Algorithm,
    state: State,
    spans: Int[Array | np.ndarray, "slots 3"],
    options: RoundOptions | None = None,
    stopped: Flag = False,
) -> tuple[State, Info]:
    """Play the rounds of each span, and evaluate at its end if the span says so.

    Once the rule has stopped the run, nothing is played any more: entries say `stopped`.
    """
    options = RoundOptions() if options is None else options
    rule = options.stop

    reuses = reuses_gradients(problem, algorithm, options)

    def step(state: State, known: Known | None) -> tuple[State, Info]:
        fed = Simulation(problem, state, options)
        fed.known = known
        state, info = fed.play(algorithm)
        return kept(state, problem.n, options.mesh), info

    def evaluate(state: State, info: Info) -> tuple[Info, Known | None]:
        found = evaluate_state(problem, algorithm, state, options, reuses)
        known = Known(jnp.asarray(True), found.pop(GRADIENTS)) if reuses else None
        if rule is not None:
            found["stopped"] = jnp.asarray(rule(info | found), bool)
        return found, known

    unknown = None
    if reuses:
        rows = jnp.zeros((problem.n, state.w.size), state.w.dtype)
        unknown = Known(jnp.asarray(False), rows)

    # One trace serves both the shapes and the program.
    run_step, (_, shapes) = _traced(step, state, unknown)
    run_evaluate, (found_shapes, _) = _traced(evaluate, state, shapes)

    def body(_: Round, carry: tuple[State, Info, Known | None]) -> tuple[State, Info, Known | None]:
        state, known = carry[0], carry[2]
        state, info = run_step(state, known)
        return state, info, None if known is None else known._replace(valid=jnp.asarray(False))

    def slot(carry: tuple[State, Flag, Known | None], span: Int[Array, "3"]) -> tuple[PyTree, Info]:
        (before, stopped, known), (start, stop, wanted) = carry, span
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        stop = jnp.where(stopped, start, stop)
        state, info, known = lax.fori_loop(start, stop, body, (before, nothing, known))
        flag = {}
        if options.milestones is not None:
            passed = options.milestones.passed(before, state)
            wanted = milestone(wanted, passed)
            flag = {"evaluated": (wanted > 0) & ~stopped}
        found, known = lax.cond(
            (wanted > 0) & ~stopped,
            lambda state, info, _: run_evaluate(state, info),
            lambda _, __, known: (
                jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), found_shapes),
                known,
            ),
            state,
            info,
            known,
        )
        counts = (wanted == GRID) & ~stopped
        state = with_best(state, found, algorithm.feasible_up_to, counts=counts)
        return (state, stopped | found.get("stopped", False), known), info | found | flag

    carry = state, jnp.asarray(stopped), unknown
    (state, _, _), entries = lax.scan(slot, carry, jnp.asarray(spans))
    return state, everywhere(entries, options.mesh)


def reuses_gradients(problem: Problem, algorithm: Algorithm, options: RoundOptions) -> bool:
    """Return whether clients' gradients are kept from an evaluation for the next round.

    Only where they are small beside the clients' data, so that to keep them costs little.
    """
    wanted = options.wants_gradient and algorithm.begins_with_gradients
    if not wanted or options.mesh is not None or not can_be_known(problem):
        return False
    data = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(problem.samples))
    gradients = problem.n * problem.dimension * jnp.result_type(float).itemsize
    return gradients <= data / 8


def _traced(function: Function, *given: PyTree) -> tuple[Function, PyTree]:
    """Trace a function once for arguments of these shapes; also return the shapes of its result."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*given)
    run, structure = jaxpr_as_fun(program), jax.tree.structure(shapes)

    def call(*arguments: PyTree) -> PyTree:
        return structure.unflatten(run(*jax.tree.leaves(arguments)))

    return call, shapes


@eqx.filter_jit
def compiled_start(
    problem: Problem, algorithm: Algorithm, seed: SeedWords, options: RoundOptions
) -> State:
    """Return the state before the first round, on the devices where it belongs."""
    key, timed = jax.random.wrap_key_data(seed), options.clock is not None
    return kept(State.start(problem, algorithm, key, timed=timed), problem.n, options.mesh)


compiled_advance = eqx.filter_jit(advance)
