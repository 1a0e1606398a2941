"""Functions of (module, data) as functions of parameters and data in JAX.

A function is traced when JAX traces it, once for each shape of data, precision and mode. That it
can be done at all, and gives PyTorch's values and derivatives, is checked when the problem is made.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.problem.samples import Mask, Samples, has_rows
from fedsolve.torch.export import CannotCompile, Program, meta, trace, traced_text
from fedsolve.torch.interpret import run
from fedsolve.torch.module import Network
from fedsolve.torch.operators.table import DrawsRandom
from fedsolve.types import Function, PRNGKey, PyTree

State = Mapping[str, PyTree]  # arrays by name
BATCH = (
    "it normalises over the batch or changes buffers, and clients differ in size: give batch_size "
    "(and drop_last=True with local_epochs), or call .eval() on the normalisation layers"
)


class Compiled:
    """A function of (module, data), in JAX.

    Args:
        name: What the function is, for messages.
        function: The function.
        network: The module.
        samples: All clients' samples, or one client that stands for test data.
        entry: The entry of the data that the function is given; None for all of them.
        kind: What it returns: a `"value"` (an average over samples, where clients differ in size),
            `"sums"` over samples, or `"rows"`, a number for each sample.
        batch_size: The number of samples in a step; None for all.
    """

    def __init__(
        self,
        name: str,
        function: Function,
        network: Network,
        samples: Samples,
        entry: str | None = None,
        kind: str = "value",
        batch_size: int | None = None,
    ):
        self.name, self.function, self.network = name, function, network
        self.entry, self.kind, self.batch_size = entry, kind, batch_size
        self.is_ragged = samples.mask is not None
        self.differs_in_training = False
        self.changed: tuple[str, ...] = ()
        self._types = jax.tree.map(_torch_type, samples.values)
        self._programs: dict[Any, Program] = {}
        self._lock = threading.RLock()

    def __call__(
        self, params: State, data: PyTree, key: PRNGKey | None = None, state: State | None = None
    ) -> tuple[PyTree, State]:
        """Compute the function in JAX.

        Args:
            params: The module's parameters, by name.
            data: One client's data; with `mask` where clients differ in size, which only sums use.
            key: Key of what it draws in training; None in evaluation.
            state: The buffers that training changes, by name.

        Returns:
            The outputs, and the next state.
        """
        data, mask = self._split(data)
        if self.kind == "sums" and mask is not None:
            return self.over_rows(params, data, mask, key, state), state or {}
        return self._compute(params, data, key, state)

    def over_rows(
        self,
        params: State,
        data: PyTree,
        mask: Mask,
        key: PRNGKey | None = None,
        state: State | None = None,
    ) -> PyTree:
        """Sum the function's outputs over single samples."""
        if isinstance(mask, dict):
            raise CannotCompile("it sums over several sets of samples that differ in size")
        leaves, structure = jax.tree.flatten(data)
        axes = [0 if has_rows(leaf, mask) else None for leaf in leaves]

        def one(row: Array, *sample: Array) -> PyTree:
            alone = structure.unflatten(
                x if axis is None else x[None] for x, axis in zip(sample, axes, strict=True)
            )
            own = None if key is None else jax.random.fold_in(key, row)
            return self._compute(params, alone, own, state)[0]

        found = jax.vmap(one, (0, *axes))(jnp.arange(len(mask)), *leaves)

        def total(rows: Array) -> Array:
            real = jnp.reshape(mask, (-1,) + (1,) * (rows.ndim - 1))
            return jnp.sum(jnp.where(real, rows, 0), axis=0)

        return jax.tree.map(total, found)

    def _split(self, data: PyTree) -> tuple[PyTree, Mask]:
        """Return the data without the mask, and the mask."""
        if isinstance(data, dict) and "mask" in data and "mask" not in self._types:
            return {name: entry for name, entry in data.items() if name != "mask"}, data["mask"]
        return data, None

    def _compute(
        self, params: State, data: PyTree, key: PRNGKey | None, state: State | None
    ) -> tuple[PyTree, State]:
        """Compute the function on samples without padding."""
        dtype = jnp.result_type(*(params[name] for name in self.network.trainable))
        shapes = jax.tree.map(lambda kind, leaf: meta(jnp.shape(leaf), kind), self._types, data)
        training = key is not None and self.network.trains
        program = self.program(shapes, dtype, training)
        if training and program.has_batch_statistics and self._is_one_of_several(shapes):
            raise InvalidInput(f"The {self.name} cannot be computed: {BATCH}.")

        def cast(array: Any) -> Any:
            return jnp.asarray(array, dtype if _is_float(array) else None)

        state = state or {}
        buffers = {name: cast(array) for name, array in {**self.network.buffers, **state}.items()}
        params = {name: cast(array) for name, array in {**self.network.params, **params}.items()}
        types = jax.tree.leaves(self._types)
        leaves = [
            jnp.asarray(leaf, dtype if kind.is_floating_point else None)
            for leaf, kind in zip(jax.tree.leaves(data), types, strict=True)
        ]
        outputs, changed = run(program, params, buffers, leaves, key if training else None)
        outputs = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), outputs)
        return outputs, {
            name: jnp.asarray(changed.get(name, buffers[name]), buffers[name].dtype)
            for name in state
        }

    def _is_one_of_several(self, shapes: PyTree) -> bool:
        """Return whether these are single samples of clients that differ in size."""
        rows = {leaf.shape[0] for leaf in jax.tree.leaves(shapes) if leaf.ndim}
        return self.is_ragged and rows == {1} and self.batch_size != 1

    def program(self, shapes: PyTree, dtype: Any, training: bool, twice: bool = False) -> Program:
        """Return the traced function for these shapes."""
        leaves, structure = jax.tree.flatten(shapes)
        which = structure, tuple(tuple(leaf.shape) for leaf in leaves), str(dtype), training
        with self._lock:
            if which not in self._programs:
                self._programs[which] = trace(
                    self.network, self._own, shapes, _precision(dtype), training, twice
                )
            return self._programs[which]

    def _own(self, module: torch.nn.Module, data: PyTree) -> PyTree:
        """Call the user's function."""
        return self.function(module, data if self.entry is None else data[self.entry])

    def look_ahead(self, params: State, samples: Samples, training: bool) -> None:
        """Trace the function for evaluation, and for training if that is to come.

        Args:
            params: The parameters.
            samples: All clients' samples.
            training: Whether the function is used in training, too.

        Raises:
            CannotCompile: If it cannot be compiled.
            InvalidInput: If it changes a buffer in evaluation.
        """
        one = jax.tree.map(lambda leaf: leaf[0], samples)
        data, dtype = (
            one.values,
            jax.dtypes.canonicalize_dtype(
                np.result_type(*(params[name] for name in self.network.trainable))
            ),
        )
        if self.is_ragged:
            data = _first_rows(data, one.mask)
        shapes = jax.tree.map(lambda kind, leaf: meta(np.shape(leaf), kind), self._types, data)
        program = self.program(shapes, dtype, training=False)
        if program.changed:
            raise InvalidInput(
                f"The {self.name} changes the module's buffer {min(program.changed)!r} in "
                "evaluation mode; change buffers only where model.training is true."
            )
        self._try(params, data, None, "in evaluation, too; draw them where model.training is true")
        if not (training and self.network.trains):
            return
        if self.batch_size is not None:
            key, size = jax.random.key(0), self.batch_size
            drawn = jax.eval_shape(lambda one: one.draw(key, size).values, _in_jax(one))
            shapes = jax.tree.map(lambda kind, leaf: meta(leaf.shape, kind), self._types, drawn)
            data = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), drawn)
        try:
            program = self.program(shapes, dtype, training=True, twice=True)
        except CannotCompile as error:  # batch normalisation refuses a single sample
            raise CannotCompile(BATCH if "more than 1 value" in str(error) else error) from error
        plain = traced_text(self.network, self._own, shapes, _precision(dtype))
        self.differs_in_training = program.text != plain
        self.changed = tuple(sorted(program.changed))
        if (
            self.is_ragged
            and self.batch_size is None
            and (program.has_batch_statistics or program.changed)
        ):
            raise CannotCompile(BATCH)
        if self.differs_in_training:
            self._try(params, data, jax.random.key(0), "without a key")

    def _try(self, params: State, data: PyTree, key: PRNGKey | None, when: str) -> None:
        """Trace the interpreted function, so that what it cannot do is found."""
        state = {name: self.network.buffers[name] for name in self.changed}
        try:
            jax.eval_shape(
                functools.partial(self._compute, key=key, state=state),
                _in_jax(params),
                _in_jax(data),
            )
        except DrawsRandom as error:
            raise InvalidInput(f"The {self.name} draws random numbers {when}.") from error


def _torch_type(leaf: Shaped[np.ndarray, "..."]) -> torch.dtype:
    """Return the type of an array as PyTorch's."""
    return torch.from_numpy(np.empty(0, leaf.dtype)).dtype


def _precision(dtype: Any) -> torch.dtype:
    """Return a floating-point type as PyTorch's."""
    return getattr(torch, str(np.dtype(dtype)))


def _is_float(array: Any) -> bool:
    """Return whether the numbers are floating-point ones."""
    return jnp.issubdtype(jnp.result_type(array), jnp.floating)


def _in_jax(tree: PyTree) -> PyTree:
    """Return shapes and types as JAX has them."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype)
        ),
        tree,
    )


def _first_rows(data: PyTree, mask: Mask) -> PyTree:
    """Return one sample of each set."""
    if isinstance(mask, dict):
        return {name: _first_rows(entry, mask[name]) for name, entry in data.items()}
    return jax.tree.map(lambda leaf: leaf[:1] if has_rows(leaf, mask) else leaf, data)
