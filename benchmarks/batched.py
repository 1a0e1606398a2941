"""Runs whose problems and algorithms differ in numbers only, as one program.

`fs.sweep` maps over algorithms and seeds; this maps over problems as well, so that the instances of
a problem whose clients draw their own data (CartPole) are one program, too. On an accelerator all
runs of such a program take little longer than one.
"""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.federation.state import State
from fedsolve.runtimes.chunks import SLOTS, padded, spans_of
from fedsolve.runtimes.history import host_history
from fedsolve.runtimes.placement import numbers_on_device
from fedsolve.runtimes.simulation import advance

AXES = (eqx.if_array(0), eqx.if_array(0), 0)
Cell = tuple[fs.Problem, fs.Algorithm, int]  # and the seed


@eqx.filter_jit
def _advance_all(problems, algorithms, states, spans):
    def one(problem, algorithm, state):
        return advance(problem, algorithm, state, spans)

    return eqx.filter_vmap(one, in_axes=AXES, out_axes=(0, 1))(problems, algorithms, states)


def _stack(*leaves):
    return jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0]


def groups(cells: Sequence[Cell]) -> list[list[int]]:
    """Places of the cells that can be one program, for each program."""
    found: dict[object, list[int]] = {}
    for place, (problem, algorithm, _) in enumerate(cells):
        leaves, structure = jax.tree.flatten(numbers_on_device((problem, algorithm), None))
        found.setdefault((structure, tuple(map(np.shape, leaves))), []).append(place)
    return list(found.values())


def histories(cells: Sequence[Cell], rounds: int, every: int) -> list[dict[str, np.ndarray]]:
    """The history of every cell, all of them one program."""
    problems = [problem.on_device() for problem, _, _ in cells]
    algorithms = [numbers_on_device(algorithm, None) for _, algorithm, _ in cells]
    problem, algorithm = (jax.tree.map(_stack, *each) for each in (problems, algorithms))
    keys = jnp.stack([jax.random.key(seed) for _, _, seed in cells])
    states = eqx.filter_vmap(State.start, in_axes=AXES)(problem, algorithm, keys)
    spans = spans_of(0, rounds, every)
    assert len(spans) <= SLOTS
    _, entries = _advance_all(problem, algorithm, states, padded(spans))
    history = host_history(entries, spans)
    return [
        {name: values if name == "round" else values[:, row] for name, values in history.items()}
        for row in range(len(cells))
    ]
