"""Runs a traced graph in JAX, operator by operator.

Each result is cast to the type that PyTorch gave it, and its shape must be PyTorch's. Images stay
with their channels last for as long as operators can use them like that.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, PyTree, Shaped

from fedsolve.torch import operators
from fedsolve.torch.export import IGNORED, CannotCompile, Program
from fedsolve.torch.operators import Last, Operator
from fedsolve.torch.operators.table import DrawsRandom
from fedsolve.types import PRNGKey

Tensor = Shaped[Array, "..."]
Values = Mapping[str, Tensor]
ATEN = torch.ops.aten
MAY_DRAW = {  # or not, according to their arguments
    ATEN.dropout.default,
    ATEN.native_dropout.default,
    ATEN.scaled_dot_product_attention.default,
    ATEN.lstm.input,
    ATEN.gru.input,
    ATEN.rnn_tanh.input,
    ATEN.rnn_relu.input,
}
DROPPED = {"layout", "device", "pin_memory", "memory_format", "non_blocking", "generator"}


def run(
    program: Program, params: Values, buffers: Values, data: Sequence[Tensor], key: PRNGKey | None
) -> tuple[PyTree, dict[str, Tensor]]:
    """Compute a traced function.

    Args:
        program: The traced function.
        params: The module's parameters, by name.
        buffers: The module's buffers, by name.
        data: The data's leaves.
        key: The key of what it draws; None if it draws nothing.

    Returns:
        The outputs, and the new values of the buffers that it changes.

    Raises:
        DrawsRandom: If it draws random numbers without a key.
    """
    kinds = {"params": params, "buffers": buffers, "constants": program.constants, "data": data}
    known: dict[str, PyTree] = {
        name: jnp.asarray(kinds[kind][which]) for name, (kind, which) in program.inputs.items()
    }
    draws = 0
    for node in program.nodes:
        if str(node.target) in IGNORED:
            continue
        args, options = _known(node.args, known), _known(node.kwargs, known)
        if node.target is operator.getitem:
            known[node.name] = args[0][args[1]]
            continue
        used = operators.find(str(node.target))
        assert used is not None, node.target
        own = None
        if used.random:
            own = None if key is None else jax.random.fold_in(key, draws)
            draws += 1
        known[node.name] = _apply(node, used, own, args, options)
    outputs = [operators.first(_known(node, known)) for node in program.outputs]
    changed = {name: operators.first(known[node.name]) for name, node in program.changed.items()}
    return program.structure.unflatten(outputs), changed


def _known(value: PyTree, known: Mapping[str, PyTree]) -> PyTree:
    """Return the value of an argument."""
    if isinstance(value, torch.fx.Node):
        return known[value.name]
    if isinstance(value, list | tuple):
        return [_known(part, known) for part in value]
    if isinstance(value, dict):
        return {name: _known(part, known) for name, part in value.items()}
    return as_dtype(value) if isinstance(value, torch.dtype) else value


def _apply(
    node: torch.fx.Node,
    used: Operator,
    key: PRNGKey | None,
    args: list[PyTree],
    options: dict[str, PyTree],
) -> PyTree:
    """Compute one operator, in the layout that it can use, and check the result."""
    options = {name: value for name, value in options.items() if name not in DROPPED}
    given = (args, options)
    images = [x for x in jax.tree.leaves(given, is_leaf=_is_image) if _is_image(x)]
    stays = bool(images) and used.layout == "any" and _spreads(given)
    if stays:
        given = jax.tree.map(_spread, given, is_leaf=_is_image)
    elif used.layout != "own":
        given = jax.tree.map(operators.first, given, is_leaf=_is_image)
    if used.random:
        if key is None and node.target not in MAY_DRAW:
            raise DrawsRandom
        given = ((key, *given[0]), given[1])
    try:
        found = used.function(*given[0], **given[1])
    except NotImplementedError as error:
        raise CannotCompile(f"it uses {error}, which is missing here") from error
    expected = node.meta.get("val")
    if isinstance(expected, tuple | list):
        return tuple(_checked(node, Last(f) if stays else f, e) for f, e in zip(found, expected))  # noqa: B905
    return _checked(node, Last(found) if stays else found, expected)


def _checked(node: torch.fx.Node, found: PyTree, expected: PyTree) -> PyTree:
    """Return a result in PyTorch's type; raise if it has another shape."""
    if found is None or not isinstance(expected, torch.Tensor):
        return found
    if tuple(found.shape) != tuple(expected.shape):
        raise CannotCompile(
            f"the operator {node.target} has the shape {tuple(found.shape)} here, and "
            f"{tuple(expected.shape)} in PyTorch"
        )
    dtype = as_dtype(expected.dtype)
    if isinstance(found, Last):
        return found if found.dtype == dtype else Last(found.array.astype(dtype))
    return found if found.dtype == dtype else found.astype(dtype)


def _is_image(value: PyTree) -> bool:
    """Return whether the value is images with their channels last."""
    return isinstance(value, Last)


def _spreads(given: PyTree) -> bool:
    """Return whether all arguments fit images with their channels last."""
    leaves = jax.tree.leaves(given, is_leaf=_is_image)
    return all(np.ndim(x) <= 4 for x in leaves if isinstance(x, jax.Array))


def _spread(value: PyTree) -> PyTree:
    """Return an argument with its channels last."""
    if isinstance(value, Last):
        return value.array
    if isinstance(value, jax.Array) and value.ndim:
        shape = (1,) * (4 - value.ndim) + value.shape
        return value.reshape(shape).transpose(0, 2, 3, 1)
    return value


def as_dtype(dtype: torch.dtype) -> np.dtype:
    """Return JAX's type for one of PyTorch's; without 64 bits where JAX has none."""
    name = str(dtype).removeprefix("torch.")
    return jax.dtypes.canonicalize_dtype(jnp.dtype({"bool": "bool_"}.get(name, name)))
