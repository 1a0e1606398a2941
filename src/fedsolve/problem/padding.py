"""Exact values of users' functions on padded samples.

Padding must not change a loss. A loss that uses `data["mask"]` takes care of that itself. A loss
that does not is taken to be an average over samples, and is then evaluated sample by sample,

    f(w) = (1 / size) Σ_s mask_s f(w; sample s),

which is the same number for every such loss, written by its author as a plain `jnp.mean`. That it
is an average is checked when the problem is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.problem.samples import Samples, full_mask, has_rows
from fedsolve.types import PyTree


class PerClient(eqx.Module):
    """A user's function of (params, one client's data), exact on padded samples.

    Args:
        function: The user's function.
        sees_mask: Whether it uses `data["mask"]`.
        averages: The set of samples that it averages over; None if there is only one set.
    """

    function: Callable = eqx.field(static=True)
    sees_mask: bool = eqx.field(static=True)
    averages: str | None = eqx.field(static=True)

    def __call__(self, params: PyTree, samples: Samples) -> PyTree:
        """Return the function's value on the real samples."""
        samples = samples.gathered()
        if self.sees_mask:
            return self.function(params, {**samples.values, "mask": full_mask(samples)})
        if samples.mask is None:
            return self.function(params, samples.values)
        name = self.averages
        mask = samples.mask if name is None else samples.mask[name]
        sampled = samples.values if name is None else samples.values[name]

        leaves, structure = jax.tree.flatten(sampled)
        axes = [0 if has_rows(leaf, mask) else None for leaf in leaves]  # None: not samples

        def one(*sample: Array) -> Float[Array, ""]:
            alone = structure.unflatten(
                leaf if axis is None else leaf[None]
                for leaf, axis in zip(sample, axes, strict=True)
            )
            return self.function(params, alone if name is None else {**samples.values, name: alone})

        values = jax.vmap(one, axes)(*leaves)
        return jnp.sum(jnp.where(mask, values, 0)) / jnp.sum(mask)


def per_client(
    name: str, function: Callable[..., Any], params: PyTree, stacked: Samples, sums: bool = False
) -> PerClient:
    """Wrap a user's function so that it is exact on padded samples; raise if that cannot be done.

    `sums`: the function returns sums over samples, not an average, so it must use the mask.
    """
    if stacked.mask is None:
        return PerClient(function, sees_mask=False, averages=None)
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), stacked)
    if isinstance(one.values, dict):
        used = _entries_used(function, params, {**one.values, "mask": full_mask(one)})
        if "mask" in used:
            return PerClient(function, sees_mask=True, averages=None)
    else:
        used = set()
    if sums:
        raise InvalidInput(f'The {name} sums over padded samples; let it use data["mask"].')
    averages = None
    if isinstance(stacked.mask, dict):
        if len(used) != 1:
            raise InvalidInput(
                f"The {name} uses several sets of samples ({', '.join(sorted(used)) or 'none'}) of "
                'clients that differ in size; let it use data["mask"].'
            )
        averages = used.pop()
    wrapped = PerClient(function, sees_mask=False, averages=averages)
    _check_average(name, wrapped, params, stacked)
    return wrapped


def _check_average(name: str, wrapped: PerClient, params: PyTree, stacked: Samples) -> None:
    """Raise if the average over single samples differs from the value on the unpadded samples."""
    masks = jax.tree.leaves(stacked.mask)
    real = sum(np.sum(np.asarray(mask), axis=1) for mask in masks)
    rng = np.random.default_rng(0)
    nearby = jax.tree.map(
        lambda p: p if callable(p) else jnp.asarray(p) + 0.1 * rng.standard_normal(np.shape(p)),
        params,
    )
    for index in {int(np.argmin(real)), int(np.argmax(real))}:
        one = jax.tree.map(lambda leaf, i=index: jnp.asarray(leaf[i]), stacked)
        if isinstance(one.mask, dict):
            bare = {
                key: jax.tree.map(lambda leaf, m=one.mask[key]: leaf[np.asarray(m)], entry)
                for key, entry in one.values.items()
            }
        else:
            keep = np.asarray(one.mask)
            bare = jax.tree.map(lambda leaf, keep=keep: leaf[keep], one.values)
        expected, got = wrapped.function(nearby, bare), wrapped(nearby, one)
        if not np.allclose(expected, got, rtol=1e-3, atol=1e-5):
            raise InvalidInput(
                f"The {name} is not an average over samples (client {index}: {float(expected):.6g} "
                f"on its samples, {float(got):.6g} as an average of single ones), so padding would "
                'change it; let it use data["mask"].'
            )


def _entries_used(
    function: Callable[..., Any], params: PyTree, data: dict[str, PyTree]
) -> set[str]:
    """Return the names of the entries of `data` that the function's value depends on."""
    numbers, rest = eqx.partition(params, eqx.is_array_like)  # a model may hold functions, too
    jaxpr = jax.make_jaxpr(lambda p, d: function(eqx.combine(p, rest), d))(numbers, data).jaxpr
    _, used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    paths = [path for path, _ in jax.tree.leaves_with_path((numbers, data))]
    return {
        str(path[1].key)
        for path, is_used in zip(paths, used, strict=True)
        if is_used and path[0] == jax.tree_util.SequenceKey(1)
    }
