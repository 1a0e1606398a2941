"""Recurrent layers, as loops over time steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fedsolve.torch.operators.random import drop
from fedsolve.torch.operators.table import Number, Tensor, operator
from fedsolve.types import PRNGKey

States = tuple[Tensor, ...]
Cell = Callable[[Tensor, States, Tensor, Tensor | None], States]


def _lstm(inside: Tensor, states: States, weight: Tensor, bias: Tensor | None) -> States:
    """Compute one step of a long short-term memory."""
    hidden, memory = states
    gates = inside + hidden @ weight.T
    gates = gates if bias is None else gates + bias
    enter, forget, new, leave = jnp.split(gates, 4, axis=-1)
    memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
    return jax.nn.sigmoid(leave) * jnp.tanh(memory), memory


def _gru(inside: Tensor, states: States, weight: Tensor, bias: Tensor | None) -> States:
    """Compute one step of a gated recurrent unit."""
    (hidden,) = states
    own = hidden @ weight.T
    own = own if bias is None else own + bias
    (in_reset, in_update, in_new), (reset, update, new) = (
        jnp.split(part, 3, axis=-1) for part in (inside, own)
    )
    share = jax.nn.sigmoid(in_update + update)
    found = jnp.tanh(in_new + jax.nn.sigmoid(in_reset + reset) * new)
    return ((1 - share) * found + share * hidden,)


def _plain(function: Callable[[Tensor], Tensor]) -> Cell:
    """Return one step of a plain recurrent layer."""

    def cell(inside: Tensor, states: States, weight: Tensor, bias: Tensor | None) -> States:
        own = inside + states[0] @ weight.T
        return (function(own if bias is None else own + bias),)

    return cell


def _layers(
    key: PRNGKey | None,
    cell: Cell,
    x: Tensor,
    starts: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: Number,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Run all layers; return the outputs and the last states, as PyTorch orders them."""
    batched = x.ndim == 3
    x = x if batched else x[:, None]
    starts = [start if batched else start[:, None] for start in starts]
    x = jnp.swapaxes(x, 0, 1) if batch_first and batched else x
    ways, each = (
        2 if bidirectional else 1,
        len(params) // (num_layers * (2 if bidirectional else 1)),
    )
    ends: list[States] = []
    for layer in range(num_layers):
        outputs = []
        for way in range(ways):
            number = layer * ways + way
            weights = params[number * each : (number + 1) * each]
            states = tuple(start[number] for start in starts)
            found, end = _run(cell, x, states, weights, has_biases, way == 1)
            outputs.append(found)
            ends.append(end)
        x = jnp.concatenate(outputs, axis=-1)
        if train and dropout and layer < num_layers - 1:
            x = drop(None if key is None else jax.random.fold_in(key, layer), x, dropout)
    x = jnp.swapaxes(x, 0, 1) if batch_first and batched else x
    lasts = [jnp.stack(parts) for parts in zip(*ends, strict=True)]
    if not batched:
        return x[:, 0], *(part[:, 0] for part in lasts)
    return x, *lasts


def _run(
    cell: Cell,
    x: Tensor,
    states: States,
    weights: Sequence[Tensor],
    has_biases: bool,
    backwards: bool,
) -> tuple[Tensor, States]:
    """Run one layer over time."""
    if len(weights) not in (2, 4):
        raise NotImplementedError("a recurrent layer with projections")
    inside = x @ weights[0].T
    inside = inside + weights[2] if has_biases else inside
    bias = weights[3] if has_biases else None

    def step(states: States, now: Tensor) -> tuple[States, Tensor]:
        states = cell(now, states, weights[1], bias)
        return states, states[0]

    states, outputs = lax.scan(step, states, inside, reverse=backwards)
    return outputs, states


@operator("aten.lstm.input", random=True)
def lstm(
    key: PRNGKey | None, x: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *options: Number
) -> tuple[Tensor, ...]:
    """Run long short-term memories."""
    return _layers(key, _lstm, x, hx, params, *options)


@operator("aten.gru.input", random=True)
def gru(
    key: PRNGKey | None, x: Tensor, hx: Tensor, params: Sequence[Tensor], *options: Number
) -> tuple[Tensor, ...]:
    """Run gated recurrent units."""
    return _layers(key, _gru, x, [hx], params, *options)


@operator("aten.rnn_tanh.input", random=True)
def rnn_tanh(
    key: PRNGKey | None, x: Tensor, hx: Tensor, params: Sequence[Tensor], *options: Number
) -> tuple[Tensor, ...]:
    """Run plain recurrent layers with tanh."""
    return _layers(key, _plain(jnp.tanh), x, [hx], params, *options)


@operator("aten.rnn_relu.input", random=True)
def rnn_relu(
    key: PRNGKey | None, x: Tensor, hx: Tensor, params: Sequence[Tensor], *options: Number
) -> tuple[Tensor, ...]:
    """Run plain recurrent layers with rectifiers."""
    return _layers(key, _plain(jax.nn.relu), x, [hx], params, *options)
