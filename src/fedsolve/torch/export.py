"""Traces a loss of (module, data) to a graph of ATen operators.

`torch.export` runs the loss once on tensors without values, and `run_decompositions` removes what
changes tensors in place and reduces some 2000 operators to about 200; those that our own table has
(`operators`) stay as they are. PyTorch maintains both, and both are exact: the new running
statistics of batch normalisation come out as outputs.

Two things would be lost by it and are put into the graph before: `detach` and `torch.no_grad`,
which decompositions drop, become an operator of our own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jaxtyping import PyTree, Shaped

from fedsolve.torch import operators
from fedsolve.torch.module import Network, as_array, first_names

IGNORED = {"aten._assert_tensor_metadata.default", "aten._assert_scalar.default"}
ITEM = "aten._local_scalar_dense.default"
NO_GRAD = "wrap_with_set_grad_enabled"


class CannotCompile(Exception):
    """A function of a module cannot be compiled; the message says why, as half a sentence."""


@torch.library.custom_op("fedsolve::stop", mutates_args=(), schema="(Tensor x) -> Tensor")
def _stop(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its derivative."""
    return x.clone()


@_stop.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function: a graph of operators and what goes into it and comes out.

    Args:
        nodes: The graph's nodes, in their order.
        inputs: Where the value of each placeholder is: the kind (`params`, `buffers`, `data`,
            `constants`) and the name or number.
        constants: Tensors that the function itself holds.
        outputs: The nodes of the function's outputs, or numbers.
        changed: The nodes of the new values of buffers that it changes, by name.
        structure: The structure of the outputs.
        has_batch_statistics: Whether it normalises over the batch.
        text: The graph as it was traced, to compare it.
    """

    nodes: tuple[torch.fx.Node, ...]
    inputs: dict[str, tuple[str, str | int]]
    constants: dict[str, Shaped[np.ndarray, "..."]]
    outputs: tuple[Any, ...]
    changed: dict[str, torch.fx.Node]
    structure: Any
    has_batch_statistics: bool
    text: str


class _Whole(torch.nn.Module):
    """The module and a function of it, as one module of the data's leaves."""

    def __init__(self, module: torch.nn.Module, function: Callable):
        super().__init__()
        self.module = module
        self.function = function
        self.training = module.training

    def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the leaves of what the function returns."""
        return self.function(self.module, leaves)


def trace(
    network: Network,
    function: Callable,
    data: PyTree,
    dtype: torch.dtype,
    training: bool,
    twice: bool = False,
) -> Program:
    """Trace a function of (module, data).

    Args:
        network: The module.
        function: The function.
        data: The data's shapes and PyTorch's types, as a tree of meta tensors.
        dtype: The precision of parameters and buffers.
        training: Whether the module is in training mode.
        twice: Whether to trace twice, to find out whether the function depends on something that
            changes between two calls.

    Raises:
        CannotCompile: If it cannot be traced, or uses an operator that is missing.
    """
    with network.lock:
        whole, given, returned = _prepared(network, function, data, dtype, training)
        exported = _export(whole, given)
        text = _text(exported)
        if twice and _text(_export(whole, given)) != text:
            raise CannotCompile(
                "it gives another program in every call, so it depends on random numbers of NumPy "
                "or Python, or on something else outside of PyTorch"
            )
        return _program(exported, returned[-1], first_names(whole.module), text)


def traced_text(network: Network, function: Callable, data: PyTree, dtype: torch.dtype) -> str:
    """Return the graph of evaluation as it is traced, to compare it."""
    with network.lock:
        whole, given, _ = _prepared(network, function, data, dtype, training=False)
        return _text(_export(whole, given))


def _prepared(
    network: Network, function: Callable, data: PyTree, dtype: torch.dtype, training: bool
) -> tuple[_Whole, tuple[torch.Tensor, ...], list[Any]]:
    """Return what is exported, its inputs, and where the outputs' structure will be."""
    leaves, structure = jax.tree.flatten(data)
    returned: list[Any] = []

    def outputs(module: torch.nn.Module, given: Sequence[torch.Tensor]) -> tuple:
        found, form = jax.tree.flatten(function(module, structure.unflatten(given)))
        returned.append(form)
        return tuple(torch.as_tensor(leaf) for leaf in found)

    kinds = [dtype if leaf.is_floating_point() else leaf.dtype for leaf in leaves]
    given = tuple(torch.empty(x.shape, dtype=kind) for x, kind in zip(leaves, kinds, strict=True))
    return _Whole(network.at(dtype, training), outputs), given, returned


def _export(whole: _Whole, given: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    """Trace to operators that PyTorch's own layers call."""
    try:
        with _quiet(), torch.enable_grad():
            return torch.export.export(whole, given, strict=False)
    except Exception as error:
        raise CannotCompile(_reason(error)) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep PyTorch from logging and printing what we say in a sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _text(exported: torch.export.ExportedProgram) -> str:
    """Return the graph and its constants, for comparison."""
    parts = [str(getattr(part, "graph", "")) for part in exported.graph_module.modules()]
    held = [f"{name} {as_array(t).tobytes()!r}" for name, t in sorted(_constants(exported).items())]
    return "\n".join([*parts, *held])


def _constants(exported: torch.export.ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the tensors that the function holds itself."""
    return {k: v for k, v in exported.constants.items() if isinstance(v, torch.Tensor)}


def _program(
    exported: torch.export.ExportedProgram, structure: Any, names: dict[str, str], text: str
) -> Program:
    """Reduce an exported graph to operators of the table."""
    statistics = any(
        str(node.target) == "aten.batch_norm.default" and _argument(node, 5, "training")
        for part in exported.graph_module.modules()
        for node in getattr(getattr(part, "graph", None), "nodes", ())
    )
    for part in exported.graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            _keep_stops(part.graph)
    try:
        with _quiet():
            core = exported.run_decompositions(_decompositions())
    except Exception as error:
        raise CannotCompile(_reason(error)) from error
    graph, signature = core.graph, core.graph_signature
    _check_operators(graph)
    held = {**core.state_dict, **_constants(core)}
    inputs, constants, count = {}, {}, 0
    for spec in signature.input_specs:
        kind, target = spec.kind.name, spec.target or ""
        own = target.removeprefix("module.")
        if kind == "USER_INPUT":
            inputs[spec.arg.name], count = ("data", count), count + 1
        elif kind in ("PARAMETER", "BUFFER") and target.startswith("module."):
            inputs[spec.arg.name] = ("params" if kind == "PARAMETER" else "buffers", names[own])
        elif kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            inputs[spec.arg.name], constants[target] = ("constants", target), as_array(held[target])
        else:
            raise CannotCompile(f"it holds a {kind.lower().replace('_', ' ')}")
    (output,) = (node for node in graph.nodes if node.op == "output")
    outputs, changed = [], {}
    for spec, node in zip(signature.output_specs, output.args[0], strict=True):
        kind = spec.kind.name
        if kind == "USER_OUTPUT":
            outputs.append(node)
        elif kind == "BUFFER_MUTATION" and str(spec.target).startswith("module."):
            changed[names[str(spec.target).removeprefix("module.")]] = node
        elif kind != "USER_INPUT_MUTATION":  # changes to its own copy of the data are its affair
            raise CannotCompile("it changes the module's parameters")
    nodes = tuple(node for node in graph.nodes if node.op not in ("placeholder", "output"))
    return Program(nodes, inputs, constants, tuple(outputs), changed, structure, statistics, text)


def _argument(node: torch.fx.Node, place: int, name: str) -> Any:
    """Return an argument of an operator, which may be given by place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _keep_stops(graph: torch.fx.Graph) -> None:
    """Put our own operator where derivatives end."""
    stop = torch.ops.fedsolve.stop.default
    for node in list(graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default):
            node.target = stop
        elif NO_GRAD in str(node.target):
            if node.args[0]:
                raise CannotCompile("it calls torch.enable_grad() inside of torch.no_grad()")
            for user in list(node.users):
                with graph.inserting_after(user):
                    ended = graph.call_function(stop, (user,))
                ended.meta = dict(user.meta)
                user.replace_all_uses_with(ended, lambda other, own=ended: other is not own)


@functools.cache
def _decompositions() -> dict:
    """Return PyTorch's decompositions of all operators that the table does not have."""
    table = torch.export.default_decompositions()
    for overload in list(table):
        if operators.find(str(overload)) is not None:
            del table[overload]
    return table


def _check_operators(graph: torch.fx.Graph) -> None:
    """Raise if the graph has an operator that is missing here, or needs values."""
    missing = set()
    for node in graph.nodes:
        name = str(node.target)
        if name == ITEM:
            raise CannotCompile("it calls .item() or makes a Python number of a tensor")
        device = node.kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            raise CannotCompile(f"it moves tensors to another device ({device})")
        sized = [node.meta.get("val")]
        if any(isinstance(v, torch.SymInt | torch.SymBool | torch.SymFloat) for v in sized):
            raise CannotCompile("the shape of a tensor depends on values (as in x[mask])")
        if node.op == "call_function" and node.target is not operator.getitem:
            if name not in IGNORED and operators.find(name) is None:
                missing.add(name)
        elif node.op not in ("placeholder", "output", "call_function"):
            missing.add(f"{node.op} {name}")
    if missing:
        raise CannotCompile(f"operators are missing here: {', '.join(sorted(missing))}")


def _reason(error: Exception) -> str:
    """Say in half a sentence why a function cannot be traced."""
    kind, message = type(error).__name__, str(error).strip()
    line = message.splitlines()[0] if message else ""
    if "DataDependent" in kind or "data-dependent" in message:
        return "its Python code branches on values of tensors (if, while, float() or .item())"
    if "fake tensor" in message:
        return "PyTorch cannot trace torch.autograd.grad, .data or .numpy() in it"
    if "linked with support for" in line or "not compiled with" in line:
        return f"it moves tensors to another device ({line})"
    return f"PyTorch cannot trace it: {kind}{': ' + line if line else ''}"


def meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without values."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
