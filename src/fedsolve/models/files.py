"""Save models to and load them from safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Array, PyTree, Shaped

from fedsolve.errors import InvalidInput

Tree = TypeVar("Tree")


def save(model: PyTree, path: str | Path) -> None:
    """Write a model's parameters to a safetensors file, each by its name (`blocks.0.norms.…`).

    Args:
        model: A network, or any tree of arrays.
        path: The file to write.

    Example:
        >>> import tempfile
        >>> import fedsolve as fs
        >>> import jax
        >>> network = fs.models.MLP((4, 4, 1), hidden=5, key=jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fs.models.save(network, f"{folder}/network.safetensors")
        ...     again = fs.models.load(network, f"{folder}/network.safetensors")
        >>> bool((again.head.weight == network.head.weight).all())
        True
    """
    safetensors.numpy.save_file({n: np.asarray(leaf) for n, leaf in _named_arrays(model)}, path)


def load(model: Tree, path: str | Path, fresh: Sequence[str] = ()) -> Tree:
    """Return the model with its parameters from a safetensors file.

    Parameters whose names begin with one of `fresh` stay as they are in `model`, and may be absent
    from the file or have another shape there: `fresh=["head"]` is fine-tuning to other classes.

    Args:
        model: A network, or any tree of arrays, of the same structure as the saved one.
        path: The file to read.
        fresh: Names, or first parts of names, of parameters that are not read.

    Returns:
        A model of the same type as `model`.

    Raises:
        InvalidInput: If the file cannot be read, or its names or shapes do not fit the model.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import jax
        >>> import fedsolve as fs
        >>> model = fs.models.MLP((4, 4, 1), hidden=2, key=jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fs.models.save(model, Path(folder, "model.safetensors"))
        ...     type(fs.models.load(model, Path(folder, "model.safetensors"))).__name__
        'MLP'
    """
    try:
        found = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise InvalidInput(f"{path} cannot be read as safetensors: {error}.") from error

    def is_fresh(name: str) -> bool:
        return any(name == f or name.startswith(f"{f}.") for f in fresh)

    wanted = [(name, leaf) for name, leaf in _named_arrays(model) if not is_fresh(name)]
    surplus = {name for name in found if not is_fresh(name)} - {name for name, _ in wanted}
    for name, leaf in wanted:
        if name not in found:
            raise InvalidInput(f"{path} has no {name}, which the model needs.")
        if found[name].shape != leaf.shape:
            raise InvalidInput(
                f"{name} has the shape {list(found[name].shape)} in {path}, but the model's is "
                f"{list(leaf.shape)}."
            )
    if surplus:
        raise InvalidInput(f"{path} has {min(surplus)}, which the model has no place for.")

    def put(name: str, leaf: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return leaf if is_fresh(name) else jnp.asarray(found[name], leaf.dtype)

    arrays, rest = eqx.partition(model, eqx.is_array)
    arrays = jax.tree.map_with_path(lambda path, leaf: put(_name(path), leaf), arrays)
    return eqx.combine(arrays, rest)


def _named_arrays(model: PyTree) -> list[tuple[str, Array]]:
    """Return the model's arrays with their names, in the order of its fields."""
    leaves = jax.tree.leaves_with_path(eqx.filter(model, eqx.is_array))
    return [(_name(path), leaf) for path, leaf in leaves]


def _name(path: jax.tree_util.KeyPath) -> str:
    """Return a leaf's name in a file, such as `blocks.0.norms.1.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
