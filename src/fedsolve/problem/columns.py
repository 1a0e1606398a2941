"""A check for columns of shape (samples, 1) that broadcast against vectors of shape (samples,)."""

from __future__ import annotations

import itertools
import re
import warnings

import equinox as eqx
import jax
import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.problem.layout import as_device_array
from fedsolve.types import Function, PyTree

# Numbers of samples that nothing else has. JAX reports a broadcast only when it first traces the
# operation, so every check takes a new number.
ROWS = itertools.count(7919)


def check_columns(name: str, function: Function, params: PyTree, values: PyTree) -> None:
    """Raise if a function combines a column of the data with a vector over the same samples.

    Labels of shape (s, 1) minus predictions of shape (s,) are a table of s × s differences: the
    loss is then a number, but not the one that was meant. The function is traced with a number of
    samples that nothing else has, while JAX reports which shapes it broadcasts.

    Args:
        name: What the function is, for the message.
        function: A user's function of (params, data).
        params: The parameters.
        values: All clients' data.

    Raises:
        InvalidInput: If a column and a vector are combined.
    """
    leaves = jax.tree.leaves_with_path(values)
    columns = [(path, leaf) for path, leaf in leaves if np.ndim(leaf) == 3 and leaf.shape[2] == 1]
    if not columns or not callable(function):
        return
    path, column = columns[0]
    samples = column.shape[1]
    sizes = {size for leaf in jax.tree.leaves((params, values)) for size in np.shape(leaf)}
    rows = next(number for number in ROWS if number not in sizes)

    def resized(leaf: PyTree) -> PyTree:
        shape = leaf.shape[1:]
        shape = (rows, *shape[1:]) if shape and shape[0] == samples else shape
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    try:
        one = jax.tree.map(resized, as_device_array(values, make=_shape))
        with warnings.catch_warnings(record=True) as found, jax.numpy_rank_promotion("warn"):
            warnings.simplefilter("always")
            eqx.filter_eval_shape(function, as_device_array(params), one)
    except Exception:  # the function needs other arguments, or this number of samples
        return
    pair = {f"({rows},)", f"({rows}, 1)"}
    for warning in found:
        shapes = set(re.findall(r"\(\d+,(?: \d+)?\)", str(warning.message)))
        if pair <= shapes:
            where = jax.tree_util.keystr(path)
            raise InvalidInput(
                f"The {name} combines an array of shape (samples,) with one of shape (samples, 1), "
                f"which gives every pair of samples. clients{where} has a last axis of length 1: "
                f"remove it, as clients{where}[..., 0]."
            )


def _shape(leaf: PyTree, dtype: object = None) -> jax.ShapeDtypeStruct:
    """Return the shape and the type that JAX gives an array."""
    return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))
