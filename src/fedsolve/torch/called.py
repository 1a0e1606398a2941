"""Functions of (module, data) that PyTorch computes, called from the compiled program.

Value, gradient and the buffers' next values come from one call for all clients. Padding is removed
before it: a function sees only its client's samples, so it is exact whatever it does with them.
Gradient descent over several steps is one call, too (`Descent`).
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, PyTree, Shaped, UInt32

from fedsolve.errors import InvalidInput
from fedsolve.problem.layout import Layout
from fedsolve.problem.samples import Mask, Samples, has_rows
from fedsolve.torch.callback import call
from fedsolve.torch.module import Network, as_array
from fedsolve.torch.pool import Clients
from fedsolve.torch.randomness import seeded
from fedsolve.torch.verify import changes, reason_of
from fedsolve.types import Function, PRNGKey, Vector

Host = Shaped[np.ndarray, "..."]
Words = UInt32[np.ndarray, "2"] | None  # of a key; None in evaluation


class Copy(NamedTuple):
    """A copy of the module whose trained parameters are parts of one vector."""

    module: torch.nn.Module
    params: list[torch.nn.Parameter]
    vector: torch.Tensor
    buffers: dict[str, torch.Tensor]


class Copies:
    """Copies of a module: one for each thread, precision and mode, as it has one w at a time."""

    def __init__(self, network: Network):
        self.network = network
        self.names = sorted(network.trainable)  # as JAX sorts them
        self.w = np.concatenate([network.params[name].ravel() for name in self.names])
        self.device = next(network.fresh(torch.float32, False).parameters()).device
        self._here = threading.local()

    @property
    def params(self) -> dict[str, Host]:
        """The trained parameters by name."""
        return {name: self.network.params[name] for name in self.names}

    def at(self, w: Host, training: bool, state: Mapping[str, PyTree] | None = None) -> Copy:
        """Return this thread's copy, with its parameters at w and its buffers as in `state`."""
        point = torch.from_numpy(np.array(w))
        known: dict[Any, Copy] = self._here.__dict__.setdefault("copies", {})
        which = point.dtype, training
        if which not in known:
            known[which] = self._make(point.dtype, training)
        copy = known[which]
        copy.vector.copy_(point)
        kept = self.network.buffers if training else {}  # or one call would depend on the last
        for name, array in {**kept, **(state or {})}.items():
            copy.buffers[name].copy_(torch.from_numpy(np.array(array)))
        return copy

    def _make(self, dtype: torch.dtype, training: bool) -> Copy:
        module = self.network.fresh(dtype, training)
        named = dict(module.named_parameters())
        params = [named[name] for name in self.names]
        vector = torch.empty(len(self.w), dtype=dtype, device=params[0].device)
        parts = vector.split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.data = part.view(param.shape)
        return Copy(module, params, vector, dict(module.named_buffers()))


class Called:
    """A user's function of (module, data) in PyTorch, as a function of (params, data) in JAX.

    It may return any structure of tensors, as for the sums of a `Statistics`; between JAX and
    PyTorch everything is a vector.

    Args:
        name: What the function is, for messages.
        function: The function.
        copies: The module.
        samples: All clients' samples, or one client that stands for test data.
        entry: The entry of the data that the function is given; None for all of them.
        smooth: Whether it must have a gradient.
    """

    def __init__(
        self,
        name: str,
        function: Function,
        copies: Copies,
        samples: Samples,
        entry: str | None = None,
        smooth: bool = True,
    ):
        if not callable(function):
            raise InvalidInput(f"The {name} must be a function of (model, data), got {function!r}.")
        self.name, self.function, self.copies = name, function, copies
        self.network = copies.network
        self.samples, self.entry, self.smooth = samples, entry, smooth
        self._values, self._slopes = Clients(self.values), Clients(self.values_and_slopes)
        self._in_jax = jax.custom_jvp(self._value)
        self._in_jax.defjvp(self._derivative)

    def __call__(
        self, params: PyTree, data: PyTree, key: PRNGKey | None = None, state: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """Compute the function in JAX; return its value and the next state."""
        mask = None
        if isinstance(data, dict) and "mask" in data and "mask" not in self.samples.values:
            data, mask = {k: v for k, v in data.items() if k != "mask"}, data["mask"]
        w = jnp.concatenate([jnp.ravel(params[name]) for name in self.copies.names])
        words = None if key is None or not self.copies.network.trains else words_of(key)
        values, state = self._in_jax(w, data, mask, words, state)
        return self.returned.unravel(values), state

    def _value(self, w: Vector, data: PyTree, mask: Mask, words: Words, state: PyTree) -> PyTree:
        """Compute the outputs as one vector, and the next state."""
        leaves, structure = jax.tree.flatten(state)
        shapes = [_shape(self.returned.size, w), *map(_like, leaves)]
        values, *after = call(self._values, shapes, w, data, mask, words, state)
        return values, structure.unflatten(after)

    def _derivative(self, primals: tuple, tangents: tuple) -> tuple[PyTree, PyTree]:
        """Compute the outputs and their derivative along a tangent."""
        w, k, (leaves, structure) = primals[0], self.returned.size, jax.tree.flatten(primals[4])
        shapes = [_shape(k, w), jax.ShapeDtypeStruct((k, w.size), w.dtype), *map(_like, leaves)]
        values, slopes, *after = call(self._slopes, shapes, *primals)
        moved = jnp.sum(slopes * tangents[0], axis=-1)
        return (values, structure.unflatten(after)), (moved, jax.tree.map(_zero, primals[4]))

    @functools.cached_property
    def returned(self) -> Layout:
        """The layout of the function's outputs in a vector.

        The function is run on all data, so that errors are raised now and not during a run.
        """
        leaves, outputs, has_gradient = jax.tree.leaves(self.samples), None, not self.smooth
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            before = self._state()
            for index in range(len(leaves[0]) if leaves else 1):
                one = jax.tree.map(lambda leaf, i=index: np.asarray(leaf[i]), self.samples)
                _, outputs = self._try(index, one)
                if index == 0:
                    first = as_array(_flat(outputs)).copy()
                    again = as_array(_flat(self._try(index, one)[1]))
                    if not np.array_equal(first, again, equal_nan=True):
                        raise changes(self.name)
                has_gradient |= any(leaf.requires_grad for leaf in jax.tree.leaves(outputs))
            after = self._state()
        if not all(a.equal(b) for a, b in zip(before, after, strict=True)):
            raise InvalidInput(
                f"The {self.name} draws random numbers or changes the module's buffers in "
                "evaluation mode; do so only where model.training is true."
            )
        if not has_gradient:
            raise InvalidInput(
                f"The {self.name} has no gradient: it must return a tensor computed from the "
                "module's parameters, without .item() or .detach()."
            )
        return Layout.of(jax.tree.map(as_array, outputs))

    def _try(self, index: int, one: Samples, words: Words = None) -> tuple[Copy, PyTree]:
        """Run the function on one client's samples; raise with a sentence if it fails."""
        try:
            return self._run(self.copies.w, one.values, one.mask, words)
        except Exception as error:
            is_metric = self.name.startswith("metric")
            where = "the test data" if is_metric else f"client {index}'s data"
            raise InvalidInput(f"The {self.name} failed on {where}: {reason_of(error)}") from error

    def _state(self) -> list[torch.Tensor]:
        """Return what a call must not change in evaluation."""
        copy = self.copies.at(self.copies.w, False)
        return [torch.get_rng_state(), *(buffer.clone() for buffer in copy.buffers.values())]

    def in_training(self) -> tuple[bool, tuple[str, ...]]:
        """Return whether training differs from evaluation, and which buffers it changes."""
        if not self.copies.network.trains:
            return False, ()
        state, words = self.copies.network.buffers, np.zeros(2, np.uint32)
        one = jax.tree.map(lambda leaf: np.asarray(leaf[0]), self.samples)
        with torch.enable_grad():
            self.copies.at(self.copies.w, True, state)
            found = [self._try(0, one, key) for key in (None, words, words + np.uint32(1))]
        plain, *random = (
            np.concatenate([as_array(x).ravel() for x in jax.tree.leaves(outputs)])
            for _, outputs in found
        )
        buffers = found[-1][0].buffers
        changed = [n for n, old in state.items() if not np.array_equal(old, as_array(buffers[n]))]
        self.copies.at(self.copies.w, True, state)
        return bool(changed) or any(not np.array_equal(plain, x) for x in random), tuple(changed)

    # The methods below use NumPy and torch alone: they must not wait for JAX, which waits for them.

    def values(self, w: Host, data: PyTree, mask: Mask, words: Words, state: PyTree) -> list[Host]:
        """Compute the outputs for one client, and the buffers after it."""
        # With gradients enabled here too: a loss may differentiate with respect to its inputs.
        with torch.enable_grad():
            copy, outputs = self._run(w, data, mask, words, state)
            return [as_array(_flat(outputs)), *buffers_of(copy, state)]

    def values_and_slopes(
        self, w: Host, data: PyTree, mask: Mask, words: Words, state: PyTree
    ) -> list[Host]:
        """Compute the outputs for one client, their derivatives by w, and the buffers after it."""
        with torch.enable_grad():
            copy, outputs = self._run(w, data, mask, words, state)
            values = _flat(outputs)
            if not (values.requires_grad or self.smooth):
                raise InvalidInput(f"The {self.name} has no gradient, and the algorithm needs one.")
            slopes = np.zeros((len(values), len(w)), w.dtype)
            if values.requires_grad:  # or else the outputs do not depend on the parameters
                for row, value in zip(slopes, values, strict=True):
                    parts = torch.autograd.grad(
                        value, copy.params, retain_graph=True, materialize_grads=True
                    )
                    row[:] = np.concatenate([as_array(part).ravel() for part in parts])
            return [as_array(values), slopes, *buffers_of(copy, state)]

    def _run(
        self, w: Host, data: PyTree, mask: Mask, words: Words, state: PyTree = None
    ) -> tuple[Copy, PyTree]:
        """Return the module, and the user's function of it and the real samples."""
        copy = self.copies.at(w, words is not None, state)
        return copy, self.on(copy, self.tensors(w.dtype, real_samples(data, mask)), words)

    def tensors(self, dtype: np.dtype, data: PyTree) -> PyTree:
        """Return one client's data as tensors."""
        device = self.copies.device

        def tensor(array: Host, given: Host) -> torch.Tensor:
            # A copy, since torch must not write to JAX's memory.
            kind = dtype if given.dtype.kind == "f" else given.dtype
            return torch.from_numpy(np.array(array, kind)).to(device)

        return jax.tree.map(tensor, data, self.samples.values)

    def on(self, copy: Copy, data: PyTree, words: Words) -> PyTree:
        """Return the user's function of a module and tensors."""
        given = data if self.entry is None else data[self.entry]
        if words is None:
            outputs = self.function(copy.module, given)
        else:
            with seeded(seed_of(words)):
                outputs = self.function(copy.module, given)
        to = copy.params[0]
        return jax.tree.map(lambda leaf: torch.as_tensor(leaf).to(to), outputs)


class Form(NamedTuple):
    """What functions take and return in JAX: a key if training differs, a state if it changes.

    Args:
        is_random: Whether training differs from evaluation, so that functions take a key.
        changed: The buffers that training changes.
    """

    is_random: bool
    changed: tuple[str, ...]

    @property
    def signature(self) -> inspect.Signature:
        """The signature of a function of this form."""
        names = ["params", "data"]
        names += ["key"] if self.is_random else []
        names += ["state"] if self.changed else []
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def split(self, extra: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
        """Return the key and the state among a function's further arguments."""
        key = extra[0] if self.is_random else None
        return key, extra[-1] if self.changed else None


class Value:
    """A function of (params, data, ...) in JAX that returns its value alone."""

    def __init__(self, called: Any, form: Form):
        self.called, self.form = called, form
        self.__qualname__ = _name_of(called.function)  # for the identity of a run
        self.__signature__ = form.signature

    def __call__(self, params: PyTree, data: PyTree, *extra: PyTree) -> PyTree:
        """Return the value."""
        return self.called(params, data, *self.form.split(extra))[0]


class Loss(Value):
    """An objective: its value, and the next state if there is one."""

    def __call__(self, params: PyTree, data: PyTree, *extra: PyTree) -> PyTree:
        """Return the value, or the value and the next state."""
        found = self.called(params, data, *self.form.split(extra))
        return found if self.form.changed else found[0]


class Metric(Value):
    """A metric of (params, test) or (params, test, state)."""

    def __call__(self, params: PyTree, data: PyTree, *extra: PyTree) -> PyTree:
        """Return the value, in evaluation."""
        return self.called(params, data, None, extra[-1] if extra else None)[0]


def _name_of(function: Function) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def words_of(key: PRNGKey) -> Array:
    """Return 64 random bits of a key as two words."""
    return jax.random.bits(key, (2,), jnp.uint32)


def seed_of(words: Host) -> int:
    """Return two words as a whole number below 2^63."""
    return (int(words[0]) << 32 | int(words[1])) >> 1


def real_samples(data: PyTree, mask: Mask) -> PyTree:
    """Return one client's samples without padding."""
    if isinstance(mask, dict):
        return {name: real_samples(entry, mask[name]) for name, entry in data.items()}
    if mask is None:
        return data
    rows = np.asarray(mask).astype(bool)
    return jax.tree.map(lambda leaf: leaf[rows] if has_rows(leaf, rows) else leaf, data)


def buffers_of(copy: Copy, state: PyTree) -> list[Host]:
    """Return the buffers of the state, in its order."""
    return (
        [as_array(copy.buffers[name]).astype(array.dtype) for name, array in sorted(state.items())]
        if state
        else []
    )


def _flat(outputs: PyTree) -> torch.Tensor:
    """Return the outputs as one vector."""
    return torch.cat([leaf.reshape(-1) for leaf in jax.tree.leaves(outputs)])


def _shape(size: int, w: Vector) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), w.dtype)


def _like(leaf: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))


def _zero(leaf: Array) -> PyTree:
    """Return the tangent of a leaf that is constant."""
    if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
        return jnp.zeros_like(leaf)
    return np.zeros(jnp.shape(leaf), jax.dtypes.float0)
