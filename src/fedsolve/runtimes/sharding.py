"""Clients over several devices: of one process, or of several that `jax.distributed` has joined.

Every device holds an equal part of the clients' data and states and works on an equal part of each
cohort. Everything else (w, the server's state, the history) is the same on all of them. All
processes run the same program on the same inputs; what depends on a clock or on a user's Ctrl-C is
decided by one of them, and the others follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedsolve.errors import InvalidInput
from fedsolve.federation.state import State
from fedsolve.problem.problem import Problem
from fedsolve.types import PyTree

Module = TypeVar("Module", bound=eqx.Module)
AXIS = "clients"
SHARED, COPIED = PartitionSpec(AXIS), PartitionSpec()


Devices = int | str | Sequence[object] | None  # a number, "all", or JAX devices


def mesh_of(devices: object) -> Mesh | None:
    """Return the devices that a user asked for: how many, "all", or which."""
    if devices is None:
        return None
    there = jax.devices()
    chosen: list[Any] = []
    if isinstance(devices, str) and devices == "all":
        chosen = there
    elif isinstance(devices, int) and not isinstance(devices, bool):
        if not 1 <= devices <= len(there):
            raise InvalidInput(
                f"devices is {devices}, but JAX sees {len(there)} ({there[0].platform}); on a CPU, "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={devices} makes more."
            )
        chosen = there[:devices]
    elif isinstance(devices, Iterable):
        chosen = list(devices)
    if not chosen or not all(isinstance(device, jax.Device) for device in chosen):
        raise InvalidInput(f'devices must be a number, "all" or JAX devices, got {devices!r}.')
    if {d.process_index for d in chosen} != set(range(jax.process_count())):
        raise InvalidInput("Every process must have one of the devices; the plain way is 'all'.")
    return Mesh(np.asarray(chosen), (AXIS,))


def several_processes() -> bool:
    """Return whether this process is one of several."""
    return jax.process_count() > 1


def _specs(tree: PyTree, clients: int, mesh: Mesh) -> PyTree:
    """Shard arrays with a row for each client, if the devices can have equally many."""

    def spec(leaf: jax.Array | np.ndarray) -> NamedSharding:
        even = np.ndim(leaf) > 0 and np.shape(leaf)[0] == clients and clients % mesh.size == 0
        return NamedSharding(mesh, SHARED if even else COPIED)

    return jax.tree.map(spec, tree)


def _copied(tree: PyTree, mesh: Mesh) -> PyTree:
    return jax.tree.map(lambda _: NamedSharding(mesh, COPIED), tree)


def problem_specs(problem: Problem, mesh: Mesh) -> Problem:
    """Return where each of the problem's arrays lies: clients' data are sharded."""
    specs = _copied(problem, mesh)
    return _with(specs, samples=_specs(problem.samples, problem.n, mesh))


def state_specs(state: State, clients: int, mesh: Mesh) -> State:
    """Return where each array of a state lies: clients' states and memories are sharded."""
    own = _specs((state.clients, state.memory), clients, mesh)
    return _with(_copied(state, mesh), clients=own[0], memory=own[1])


def spread(tree: PyTree, specs: PyTree) -> PyTree:
    """Put arrays where they belong. Every process has them all, and takes its part."""

    def place(leaf: object, sharding: NamedSharding) -> object:
        if not isinstance(leaf, np.ndarray | jax.Array):
            return leaf
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])

    return jax.tree.map(place, tree, specs)


def copied(tree: PyTree, mesh: Mesh) -> PyTree:
    """Copy arrays to every device."""
    return spread(tree, _copied(tree, mesh))


def kept(state: State, clients: int, mesh: Mesh | None) -> State:
    """Inside a program, constrain the state to lie where it belongs."""
    if mesh is None:
        return state
    return jax.lax.with_sharding_constraint(state, state_specs(state, clients, mesh))


def shared(tree: PyTree, mesh: Mesh) -> PyTree:
    """Inside a program, constrain arrays to be sharded on the leading axis."""
    specs = jax.tree.map(lambda _: NamedSharding(mesh, SHARED), tree)
    return jax.lax.with_sharding_constraint(tree, specs)


def everywhere(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Inside a program, constrain arrays to be copied to every device."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, _copied(tree, mesh))


def whole(tree: PyTree) -> PyTree:
    """Return arrays with the parts of all processes, on the host. All processes must call this."""
    if not several_processes():
        return tree
    from jax.experimental.multihost_utils import process_allgather

    return jax.tree.map(
        lambda leaf: process_allgather(leaf, tiled=True) if isinstance(leaf, jax.Array) else leaf,
        tree,
    )


def anyone(flag: bool) -> bool:
    """Return whether the flag is set in any process. All processes must call this."""
    if not several_processes():
        return flag
    from jax.experimental.multihost_utils import process_allgather

    return bool(np.any(process_allgather(np.asarray(flag))))


def agreed(*numbers: int) -> tuple[int, ...]:
    """Return the first process's numbers, in every process."""
    if not several_processes():
        return numbers
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return tuple(int(n) for n in broadcast_one_to_all(np.asarray(numbers, np.int32)))


def _with(module: Module, **fields: PyTree) -> Module:
    names = list(fields)
    return eqx.tree_at(
        lambda tree: [getattr(tree, name) for name in names],
        module,
        list(fields.values()),
        is_leaf=lambda node: node is None,
    )
