"""The layout of a structure of parameters in one flat vector."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.types import Function, PyTree, Vector

Which = Sequence[str] | Function | None  # names of leaves, or a function of (name, leaf)
SHARED, PERSONAL, FROZEN = "shared", "personal", "frozen"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a structure of parameters is laid out in one flat vector.

    Floating-point arrays are parameters. Some of them may be personal (each client has its own, in
    a vector of its own) or frozen (never trained). Other leaves of a model (an activation function,
    say) have no shape here and are kept as they are.

    Args:
        structure: The structure of the parameters' tree.
        shapes: For each leaf its shape; None for a leaf that is not a parameter.
        fixed: For each leaf the value of one that is not a parameter; None for a parameter.
        kinds: For each leaf `"shared"`, `"personal"` or `"frozen"`; None for all shared.
    """

    structure: PyTree  # a `jax.tree_util.PyTreeDef`
    shapes: tuple[tuple[int, ...] | None, ...]
    fixed: tuple[object, ...]
    kinds: tuple[str, ...] | None = None

    @classmethod
    def of(cls, params: PyTree, trainable: Which = None, personal: Which = None) -> Layout:
        """Return the layout of these parameters.

        Args:
            params: The parameters.
            trainable: Which of them are trained; None for all.
            personal: Which of these stay on the clients; None for none.
        """
        leaves, structure = jax.tree.flatten(params)
        shapes = tuple(np.shape(leaf) if is_parameter(leaf) else None for leaf in leaves)
        fixed = tuple(None if is_parameter(leaf) else leaf for leaf in leaves)
        if trainable is None and personal is None:
            return cls(structure, shapes, fixed)
        trained = _chosen("trainable", trainable, params, everything=True)
        own = _chosen("personal", personal, params, everything=False)
        kinds = tuple(
            FROZEN if not train else PERSONAL if stays else SHARED
            for train, stays in zip(trained, own, strict=True)
        )
        return cls(structure, shapes, fixed, kinds)

    @property
    def size(self) -> int:
        """The length of the vector, d."""
        return sum(int(np.prod(shape)) for shape, _ in self._parameters(SHARED))

    @property
    def personal_size(self) -> int:
        """The length of the vector of a client's personal parameters."""
        return sum(int(np.prod(shape)) for shape, _ in self._parameters(PERSONAL))

    def names(self, params: PyTree, kind: str = SHARED) -> tuple[str, ...] | None:
        """Return the names of the parameters of a kind; None if all are shared."""
        if self.kinds is None:
            return None
        names = [name_of(path) for path, _ in jax.tree.leaves_with_path(params)]
        return tuple(names[i] for _, i in self._parameters(kind))

    def ravel(self, params: PyTree, kind: str = SHARED) -> Vector:
        """Return the parameters of one kind as one vector."""
        leaves = jax.tree.leaves(params)
        return jnp.concatenate([jnp.ravel(leaves[i]) for _, i in self._parameters(kind)])

    def frozen(self, params: PyTree) -> tuple[PyTree, ...]:
        """Return the parameters that are not trained."""
        leaves = jax.tree.leaves(params)
        return tuple(leaves[i] for _, i in self._parameters(FROZEN))

    def unravel(
        self,
        w: Float[Array | np.ndarray, " d"],
        personal: Float[Array | np.ndarray, " p"] | None = None,
        frozen: Sequence[PyTree] = (),
    ) -> PyTree:
        """Return the vectors as parameters in their structure."""
        leaves = list(self.fixed)
        for vector, kind in ((w, SHARED), (personal, PERSONAL)):
            start = 0
            for shape, i in self._parameters(kind):
                assert vector is not None
                stop = start + int(np.prod(shape))
                leaves[i] = vector[start:stop].reshape(shape)
                start = stop
        for (_, i), leaf in zip(self._parameters(FROZEN), frozen, strict=True):
            leaves[i] = leaf
        return jax.tree.unflatten(self.structure, leaves)

    def _parameters(self, kind: str) -> list[tuple[tuple[int, ...], int]]:
        """Return shape and place of each parameter of a kind."""
        kinds = (SHARED,) * len(self.shapes) if self.kinds is None else self.kinds
        return [
            (shape, i)
            for i, (shape, own) in enumerate(zip(self.shapes, kinds, strict=True))
            if shape is not None and own == kind
        ]


def _chosen(option: str, which: Which, params: PyTree, everything: bool) -> list[bool]:
    """Return for each leaf whether `which` names it."""
    named = [(name_of(path), leaf) for path, leaf in jax.tree.leaves_with_path(params)]
    if which is None:
        return [everything] * len(named)
    if callable(which):
        return [bool(which(name, leaf)) for name, leaf in named]
    if isinstance(which, str) or not all(isinstance(each, str) for each in which):
        raise InvalidInput(
            f"{option} must be a list of names of parameters, or a function of (name, value), got "
            f"{which!r}."
        )

    def fits(name: str, each: str) -> bool:
        return name == each or name.startswith(f"{each}.")

    for each in which:
        if not any(fits(name, each) for name, _ in named):
            raise InvalidInput(
                f"{option} names {each!r}, but the parameters are {', '.join(n for n, _ in named)}."
            )
    return [any(fits(name, each) for each in which) for name, _ in named]


def name_of(path: tuple[Any, ...]) -> str:
    """Return a leaf's name, such as `blocks.0.norms.1.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_parameter(leaf: object) -> bool:
    """Return whether a leaf is an array (or a plain number) of floating-point type."""
    if not (eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.floating | float)):
        return False
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.floating))


def as_device_array(
    tree: PyTree, dtype: DTypeLike | None = None, make: Function = jnp.asarray
) -> PyTree:
    """Return arrays and floating-point numbers as JAX arrays, floating ones in `dtype` if given."""

    def place(leaf: PyTree) -> PyTree:
        if is_parameter(leaf):
            return make(leaf, dtype)
        return make(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(place, tree)
