"""Exact values of users' functions on padded samples.

Padding must not change a loss. A loss that uses `data["mask"]` takes care of that itself. A loss
that does not is taken to be an average over samples, and is then evaluated sample by sample,

    f(w) = (1 / size) Σ_s mask_s f(w; sample s),

which is the same number for every such loss, written by its author as a plain `jnp.mean`. That it
is an average is checked when the problem is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.problem.local_pass import HasLocalPass
from fedsolve.problem.samples import Samples, full_mask, has_rows, is_pieces
from fedsolve.types import Function, PyTree, Vector

PART = 64  # rows of a part of a client's samples


class PerClient(eqx.Module):
    """A user's function of (params, one client's data), exact on padded samples.

    Args:
        function: The user's function.
        sees_mask: Whether it uses `data["mask"]`.
        averages: The set of samples that it averages over; None if there is only one set.
        is_random: Whether it takes a key, as a random loss does.
        has_state: Whether it takes the problem's state.
        returns_state: Whether it also returns the next state.
    """

    function: Callable = eqx.field(static=True)
    sees_mask: bool = eqx.field(static=True)
    averages: str | None = eqx.field(static=True)
    is_random: bool = eqx.field(static=True, default=False)
    has_state: bool = eqx.field(static=True, default=False)
    returns_state: bool = eqx.field(static=True, default=False)

    def __call__(self, params: PyTree, samples: Samples) -> PyTree:
        """Return the function's value on the real samples."""
        return self._value(params, samples)[0]

    def moved(self, params: PyTree, samples: Samples) -> tuple[PyTree, PyTree]:
        """Return the function's value on the real samples, and the next state."""
        value, state = self._value(params, samples)
        return value, samples.state if state is None else state

    def _on(
        self, params: PyTree, data: PyTree, samples: Samples, row: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        """Call the user's function with what it takes; return its value and the next state."""
        noise = samples.noise
        if noise is not None and row is not None:
            noise = jax.random.fold_in(noise, row)
        extra = ((noise,) if self.is_random else ()) + ((samples.state,) if self.has_state else ())
        found = self.function(params, data, *extra)
        return found if self.returns_state else (found, None)

    def _value(self, params: PyTree, samples: Samples) -> tuple[PyTree, PyTree]:
        samples = samples.gathered()
        if self.sees_mask:
            return self._on(params, {**samples.values, "mask": full_mask(samples)}, samples)
        if samples.mask is None:
            return self._on(params, samples.values, samples)
        if self.returns_state and samples.noise is not None:
            raise InvalidInput(
                "A loss with a state is not an average over single samples, so it cannot train on "
                "padded ones; give batch_size (and drop_last=True with local_epochs), or let the "
                'loss use data["mask"].'
            )
        mask = samples.mask if self.averages is None else samples.mask[self.averages]
        return self._total(params, samples) / jnp.sum(mask), None

    def _total(self, params: PyTree, samples: Samples) -> Float[Array, ""]:
        """Return the sum of the values of single samples."""
        name = self.averages
        mask = samples.mask if name is None else samples.mask[name]
        sampled = samples.values if name is None else samples.values[name]

        leaves, structure = jax.tree.flatten(sampled)
        axes = [0 if has_rows(leaf, mask) else None for leaf in leaves]  # None: not samples

        def one(row: Array | None, *sample: Array) -> Float[Array, ""]:
            alone = structure.unflatten(
                leaf if axis is None else leaf[None]
                for leaf, axis in zip(sample, axes, strict=True)
            )
            data = alone if name is None else {**samples.values, name: alone}
            return self._on(params, data, samples, row)[0]

        rows = None if samples.noise is None else jnp.arange(len(mask))
        values = jax.vmap(one, (None if rows is None else 0, *axes))(rows, *leaves)
        return jnp.sum(jnp.where(mask, values, 0))

    def has_parts(self, samples: Samples) -> bool:
        """Return whether `slope_by_parts` applies: to averages over one set of many samples."""
        mask = samples.mask
        if mask is None or isinstance(mask, dict) or len(mask) < 2 * PART:
            return False
        if any(map(is_pieces, jax.tree.leaves(samples.values, is_leaf=is_pieces))):
            return False
        plain = not (self.sees_mask or self.is_random or self.has_state)
        return plain and not isinstance(self.function, HasLocalPass)

    def slope_by_parts(
        self, params_at: Callable[[Vector], PyTree], w: Vector, samples: Samples
    ) -> Vector:
        """Return the gradient at w from parts of the rows, up to the last that has real ones.

        The real samples must be the first rows, so that the time is that of their number.
        """
        mask, length = samples.mask, len(samples.mask)

        def add(part: Array, total: Vector) -> Vector:
            begin = part * PART
            first = jnp.minimum(begin, length - PART)  # the last part overlaps the one before

            def cut(leaf: Array) -> Array:
                return lax.dynamic_slice_in_dim(leaf, first, PART)

            values = jax.tree.map(lambda x: cut(x) if has_rows(x, mask) else x, samples.values)
            real = cut(mask) & (first + jnp.arange(PART) >= begin)
            some = Samples(values, real)
            return total + jax.grad(lambda w: self._total(params_at(w), some))(w)

        count = jnp.sum(mask, dtype=jnp.int32)
        return lax.fori_loop(0, -(-count // PART), add, jnp.zeros_like(w)) / count


def per_client(
    name: str,
    function: Function,
    params: PyTree,
    stacked: Samples,
    sums: bool = False,
    state: PyTree = None,
    moves: bool = False,
) -> PerClient:
    """Wrap a user's function so that it is exact on padded samples; raise if that cannot be done.

    Args:
        name: What the function is, for messages.
        function: The function, of (params, data) and perhaps of a key and a state.
        params: The parameters.
        stacked: All clients' samples.
        sums: Whether it returns sums over samples, not an average, so that it must use the mask.
        state: The problem's state; None for none.
        moves: Whether the function returns the next state, too.
    """
    has_state = state is not None
    extra = is_random(function), has_state, moves and has_state
    if stacked.mask is None:
        return PerClient(function, False, None, *extra)
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), stacked)
    plain = _in_evaluation(function, *extra, state)
    if isinstance(one.values, dict):
        used = _entries_used(plain, params, {**one.values, "mask": full_mask(one)})
        if "mask" in used:
            return PerClient(function, True, None, *extra)
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
    _check_average(name, PerClient(plain, False, averages), params, stacked)
    return PerClient(function, False, averages, *extra)


def is_random(function: Function) -> bool:
    """Return whether a function of (params, data) takes a key as its third argument.

    That is an argument named `key`, or one that has no default.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some callables have no signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3:
        return False
    third = positional[2]
    return third.name == "key" or (third.name != "state" and third.default is third.empty)


def _in_evaluation(
    function: Function, is_random: bool, has_state: bool, moves: bool, state: PyTree
) -> Function:
    """Return the function of (params, data) that evaluation uses."""

    def plain(params: PyTree, data: PyTree) -> PyTree:
        extra = ((None,) if is_random else ()) + ((state,) if has_state else ())
        found = function(params, data, *extra)
        return found[0] if moves else found

    return plain if is_random or has_state else function


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


def _entries_used(function: Function, params: PyTree, data: dict[str, PyTree]) -> set[str]:
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
