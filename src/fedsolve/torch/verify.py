"""Checks of a user's functions by PyTorch itself, when the problem is made."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import PyTree, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.problem.samples import Mask, Samples, counts, has_rows
from fedsolve.torch.compiled import Compiled
from fedsolve.torch.export import CannotCompile
from fedsolve.torch.module import Network, as_array
from fedsolve.types import Function

Array = Shaped[np.ndarray, "..."]
CPU = " Fedsolve places data and parameters itself: leave them where they are."
SHAPES = (
    ". The samples of a Dataset differ in shape: crop, resize or pad them in its transform, or "
    "give the DataLoader a collate_fn."
)
KINDS = {  # what a function must return where clients differ in size
    "value": "average over samples",
    "sums": "sum over samples",
    "rows": "number for each sample that does not depend on the others",
}
VALUES, SLOPES = 1e-3, 1e-2  # relative differences that rounding may cause


@dataclasses.dataclass(frozen=True)
class Found:
    """What PyTorch computes for one client: outputs, and the derivative of their sum."""

    outputs: list[Array]
    slopes: dict[str, Array]


def check_function(
    name: str,
    function: Function,
    network: Network,
    samples: Samples,
    entry: str | None = None,
    smooth: bool = True,
) -> dict[int, Found]:
    """Run a function in PyTorch, in evaluation mode, on the clients that are most likely to fail.

    These are the first, the smallest and the largest, and those with the least and the greatest
    whole numbers, such as labels.

    Args:
        name: What the function is, for messages.
        function: The function of (module, data).
        network: The module.
        samples: All clients' samples.
        entry: The entry of the data that the function is given; None for all of them.
        smooth: Whether the function must have a derivative.

    Returns:
        What it computes, by client.

    Raises:
        InvalidInput: If it fails, has no derivative, draws random numbers or changes a buffer.
    """
    dtype = next(p for n, p in network.params.items() if n in network.trainable).dtype
    precision = getattr(torch, str(jax.dtypes.canonicalize_dtype(dtype)))
    module = network.fresh(precision, training=False)
    params = {n: p for n, p in module.named_parameters() if p.requires_grad}
    found, has_gradient = {}, not smooth
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for index in _telling(samples):
            one = jax.tree.map(lambda leaf, i=index: leaf[i], samples)
            where = f"client {index}'s data" if smooth else "the test data"
            outputs = _called(name, function, module, one, entry, where)
            if not found:
                again = _called(name, function, module, one, entry, where)
                if not all(map(_same, outputs, again)):
                    raise changes(name)
            smooth_ones = [x for x in outputs if x.requires_grad]
            has_gradient |= bool(smooth_ones)
            slopes = {}
            if smooth_ones and smooth:
                total = torch.stack([x.sum() for x in smooth_ones]).sum()
                grads = torch.autograd.grad(total, list(params.values()), materialize_grads=True)
                slopes = {n: as_array(g) for n, g in zip(params, grads, strict=True)}
            found[index] = Found([as_array(x) for x in outputs], slopes)
    if not has_gradient:
        raise InvalidInput(
            f"The {name} has no gradient: it must return a tensor computed from the module's "
            "parameters, without .item() or .detach()."
        )
    return found


def _called(
    name: str,
    function: Function,
    module: torch.nn.Module,
    one: Samples,
    entry: str | None,
    where: str,
) -> list[torch.Tensor]:
    """Call a function in PyTorch; raise if it does more than to return something."""
    precision = next(module.parameters()).dtype

    def tensor(array: Array) -> torch.Tensor:
        found = torch.from_numpy(np.array(array))
        return found.to(precision) if found.is_floating_point() else found

    data = jax.tree.map(tensor, _real(one.values, one.mask))
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    before = torch.get_rng_state()
    try:
        outputs = function(module, data if entry is None else data[entry])
        found = [torch.as_tensor(leaf) for leaf in jax.tree.leaves(outputs)]
    except Exception as error:
        raise InvalidInput(f"The {name} failed on {where}: {reason_of(error)}") from error
    for leaf in found:
        if leaf.device.type != "cpu":
            raise InvalidInput(f"The {name} returns a tensor on the device {leaf.device}.{CPU}")
    for buffer, held in module.named_buffers():
        if not _same(held, buffers[buffer]):
            raise InvalidInput(
                f"The {name} changes the module's buffer {buffer!r} in evaluation mode; change "
                "buffers only where model.training is true."
            )
    if not before.equal(torch.get_rng_state()):
        raise InvalidInput(
            f"The {name} draws random numbers in evaluation, too; draw them where model.training "
            "is true."
        )
    return found


def check_rows(name: str, samples: Samples, outputs: list[Array]) -> None:
    """Raise if a function did not return a number for each sample of client 0."""
    rows = int(counts(samples)[0])
    shapes = [output.shape for output in outputs]
    if shapes != [(rows,)]:
        found = str(shapes[0]) if len(shapes) == 1 else f"{len(shapes)} arrays"
        raise InvalidInput(
            f"The {name}'s function must return one number for each of {rows} samples, got shape "
            f"{found}."
        )


def changes(name: str) -> InvalidInput:
    """Return the error of a function that depends on common random numbers."""
    return InvalidInput(
        f"The {name} gives another value in every call, for the same parameters and data; draw "
        "random numbers by torch.rand and others where model.training is true."
    )


def reason_of(error: Exception) -> str:
    """Return why a user's function failed, in a line, with what to do where that is known."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if "CUDA" in reason or "support for" in reason or "expected device" in reason:
        return reason + CPU
    return reason + SHAPES if "stack expects each tensor" in reason else reason


def compare(compiled: Compiled, samples: Samples, found: dict[int, Found], smooth: bool) -> None:
    """Raise `CannotCompile` if the compiled function and PyTorch disagree.

    Args:
        compiled: The compiled function.
        samples: All clients' samples.
        found: What PyTorch computes, by client.
        smooth: Whether to compare derivatives, too.
    """
    network, mask = compiled.network, samples.mask

    def total(params: dict, one: Samples) -> tuple[PyTree, list]:
        data = one.values
        if one.mask is None:
            outputs = compiled(params, data)[0]
        elif compiled.kind == "rows":
            (row,) = jax.tree.leaves(compiled(params, {**data, "mask": one.mask})[0])
            outputs = jnp.where(one.mask, row, 0)
        else:
            outputs = compiled.over_rows(params, data, one.mask)
            if compiled.kind == "value":
                outputs = jax.tree.map(lambda x: x / one.mask.sum(), outputs)
        leaves = jax.tree.leaves(outputs)
        return sum(leaf.sum() for leaf in leaves), leaves

    if isinstance(mask, dict):  # which set is averaged over is for `Problem` to find out
        clients = {i: _bare(samples, i) for i in list(found)[:1]}
    else:
        chosen = list(found) if mask is not None else list(found)[:1]
        clients = {i: jax.tree.map(lambda leaf, i=i: leaf[i], samples) for i in chosen}
    function = jax.jit(jax.value_and_grad(total, has_aux=True) if smooth else total)
    own = {n: p for n, p in network.params.items() if n in network.trainable}
    for index, one in clients.items():
        result, expected = function(own, one), found[index]
        (_, outputs), slopes = result if smooth else ((result), {})
        if compiled.kind == "rows" and one.mask is not None:
            outputs = [np.asarray(x)[np.asarray(one.mask)] for x in outputs]
        for ours, theirs in zip(outputs, expected.outputs, strict=True):
            if not np.allclose(ours, theirs, VALUES, VALUES * 1e-2, equal_nan=True):
                _disagree(compiled, index, np.asarray(ours), theirs)
        differences = [np.ravel(slopes[n] - g) for n, g in expected.slopes.items()]
        if differences and smooth:
            size = np.linalg.norm(np.concatenate([g.ravel() for g in expected.slopes.values()]))
            apart = np.linalg.norm(np.concatenate(differences))
            if np.isfinite(size) and not apart <= SLOPES * size + 1e-5:
                raise CannotCompile(
                    f"its compiled derivative differs from PyTorch's by {apart:.2g} in norm, of "
                    f"{size:.2g}, on client {index}'s data"
                )


def _disagree(compiled: Compiled, index: int, ours: Array, theirs: Array) -> None:
    """Raise, with the likely reason."""
    if compiled.is_ragged:
        raise CannotCompile(
            f"it is no {KINDS[compiled.kind]}, and clients differ in "
            f"size (client {index}: {theirs.ravel()[0]:.6g} on its samples, {ours.ravel()[0]:.6g} "
            "from single ones)"
        )
    raise CannotCompile(
        f"its compiled value differs from PyTorch's on client {index}'s data: "
        f"{ours.ravel()[0]:.6g}, not {theirs.ravel()[0]:.6g}"
    )


def _telling(samples: Samples) -> list[int]:
    """Return the clients that are most likely to make a function fail."""
    leaves = jax.tree.leaves(samples.values)
    if not leaves:
        return [0]
    chosen = [0]
    if samples.mask is not None:
        sizes = counts(samples)
        chosen += [int(np.argmin(sizes)), int(np.argmax(sizes))]
    for leaf in leaves:
        array = np.asarray(leaf)
        if array.dtype.kind in "iu" and array.ndim and array.size:
            rows = array.reshape(len(array), -1)
            chosen += [int(np.argmin(rows.min(axis=1))), int(np.argmax(rows.max(axis=1)))]
    return list(dict.fromkeys(chosen))


def _bare(samples: Samples, index: int) -> Samples:
    """Return one client's samples without padding."""
    one = jax.tree.map(lambda leaf: leaf[index], samples)
    return Samples(_real(one.values, one.mask))


def _real(data: PyTree, mask: Mask) -> PyTree:
    """Return one client's samples without padding."""
    if isinstance(mask, dict):
        return {name: _real(entry, mask[name]) for name, entry in data.items()}
    if mask is None:
        return data
    rows = np.asarray(mask, bool)
    return jax.tree.map(lambda leaf: leaf[rows] if has_rows(leaf, rows) else leaf, data)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal; NaN equals NaN."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
