"""Trust region policy optimization, from given trajectories.

Papers: "Trust Region Policy Optimization" (Schulman et al., 2015), section 6 and appendix C;
"High-Dimensional Continuous Control Using Generalized Advantage Estimation" (2016), equation 16.

A policy gives, for each state, the mean and the logarithm of the standard deviation of a normal
distribution over actions. All arrays of a batch have the shape (steps, environments).

| here | papers | |
|---|---|---|
| `radius` | δ | bound on the mean KL divergence of a step |
| `discount`, `trace` | γ, λ | of the generalised advantages |
| `damping` | | added to the Fisher matrix, in units of the identity |
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fedsolve.types import Number, Vector

Steps = Float[Array, "steps environments"]
Flags = Bool[Array, "..."]
Values = Float[Array, "..."]
Normal = tuple[Values, Values]  # mean and logarithm of the standard deviation, for each state
Layer = dict[str, Float[Array, "..."] | Float[np.ndarray, "..."]]  # "weight" and "bias"


# Networks


def network(rng: np.random.Generator, sizes: Sequence[int], last: float = 1.0) -> list[Layer]:
    """Draw the weights of a tanh network, of variance 1 / inputs; the last layer's times `last`."""
    layers = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        scale = (last if number == len(sizes) - 2 else 1.0) / np.sqrt(inputs)
        weight = scale * rng.standard_normal((inputs, outputs))
        layers.append({"bias": np.zeros(outputs), "weight": weight})
    return layers


def forward(layers: list[Layer], inputs: Float[Array, "*batch i"]) -> Float[Array, "*batch o"]:
    """Compute the network's outputs."""
    for layer in layers[:-1]:
        inputs = jnp.tanh(inputs @ layer["weight"] + layer["bias"])
    return inputs @ layers[-1]["weight"] + layers[-1]["bias"]


# Normal distributions


def log_density(normal: Normal, actions: Values) -> Values:
    """Compute log π(a | s)."""
    mean, log_std = normal
    return -0.5 * ((actions - mean) * jnp.exp(-log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)


def divergence(old: Normal, new: Normal) -> Values:
    """Compute KL(old ‖ new), state by state."""
    ratio = jnp.exp(2 * (old[1] - new[1]))
    apart = ((old[0] - new[0]) * jnp.exp(-new[1])) ** 2
    return new[1] - old[1] + 0.5 * (ratio + apart - 1)


# Advantages


def advantages(
    rewards: Steps,
    values: Steps,
    last_values: Float[Array, " environments"],
    ended: Bool[Array, "steps environments"],
    discount: Number,
    trace: Number,
) -> Steps:
    """Compute A_t = Σ_k (γλ)^k δ_{t+k} within an episode, δ_t = r_t + γ V(s_{t+1}) − V(s_t).

    V is 0 beyond the end of an episode; the last states' values stand for the rewards after the
    batch.
    """
    after = jnp.where(ended, 0, jnp.concatenate([values[1:], last_values[None]]))
    deltas = rewards + discount * after - values

    def back(advantage: Values, step: tuple[Values, Flags]) -> tuple[Values, Values]:
        delta, end = step
        advantage = delta + discount * trace * jnp.where(end, 0, advantage)
        return advantage, advantage

    return lax.scan(back, jnp.zeros_like(last_values), (deltas, ended), reverse=True)[1]


# The step


def fisher(normal_of: Callable[[Vector], Normal], w: Vector) -> Callable[[Vector], Vector]:
    """Return v ↦ F v, with F the mean over states of the Fisher information of w.

    A normal distribution's information about (mean, log std) is diag(1/σ², 2), so F = Jᵀ diag J / n
    with J the derivative of both by w.
    """
    (mean, log_std), derivative = jax.linearize(normal_of, w)
    back = jax.linear_transpose(derivative, w)
    precision, count = jnp.exp(-2 * log_std), mean.size

    def product(v: Vector) -> Vector:
        of_mean, of_log_std = derivative(v)
        return back((precision * of_mean / count, 2 * of_log_std / count))[0]

    return product


def conjugate_gradients(
    product: Callable[[Vector], Vector], b: Vector, iterations: int
) -> tuple[Vector, Vector]:
    """Compute x with A x ≈ b, and A x, in `iterations` steps; they stop changing x at A x = b."""

    def iterate(_: Int[Array, ""], carry: tuple) -> tuple:
        x, residual, along, square = carry
        image = product(along)
        curvature = along @ image
        go = (square > 1e-12 * (b @ b)) & (curvature > 0)
        length = jnp.where(go, square / jnp.where(go, curvature, 1), 0)
        x, residual = x + length * along, residual - length * image
        new = residual @ residual
        along = jnp.where(go, residual + new / jnp.where(go, square, 1) * along, along)
        return x, residual, along, new

    start = jnp.zeros_like(b), b, b, b @ b
    x, residual, _, _ = lax.fori_loop(0, iterations, iterate, start)
    return x, b - residual


def step(
    policy: Callable[[Vector, Float[Array, "states s"]], Normal],
    w: Vector,
    states: Float[Array, "n s"],
    actions: Float[Array, " n"],
    log_densities: Float[Array, " n"],
    gains: Float[Array, " n"],
    *,
    radius: Number,
    damping: Number = 0.1,
    iterations: int = 10,
    thin: int = 1,
    backtracks: int = 10,
) -> Vector:
    """Compute TRPO's change of w: along F⁻¹∇, as far as the KL divergence allows.

    `log_densities` are those under the policy that drew the actions, `gains` the advantages to
    increase. The Fisher matrix is that of every `thin`-th state. The length is halved until the
    mean KL divergence is within the radius and the surrogate has grown; failing that, it is 0.
    """

    def surrogate(w: Vector) -> Float[Array, ""]:
        ratio = jnp.exp(log_density(policy(w, states), actions) - log_densities)
        return jnp.mean(ratio * gains)

    now, gradient = jax.value_and_grad(surrogate)(w)
    information = fisher(lambda w: policy(w, states[::thin]), w)
    natural, image = conjugate_gradients(
        lambda v: information(v) + damping * v, gradient, iterations
    )
    # (natural · F natural) / 2 = δ at the boundary; the damping only makes the step shorter
    square = natural @ image
    full = jnp.where(square > 0, jnp.sqrt(2 * radius / jnp.where(square > 0, square, 1)), 0)
    here = policy(w, states)

    def good(length: Float[Array, ""]) -> Bool[Array, ""]:
        there = w + length * natural
        apart = jnp.mean(divergence(here, policy(there, states)))
        return (apart <= radius) & (surrogate(there) > now)

    def shorten(carry: tuple) -> tuple:
        tries, length, _ = carry
        return tries + 1, length / 2, good(length / 2)

    def unfinished(carry: tuple) -> Bool[Array, ""]:
        tries, _, found = carry
        return ~found & (tries < backtracks)

    _, length, found = lax.while_loop(unfinished, shorten, (0, full, good(full)))
    return jnp.where(found, length, 0) * natural


def standardised(gains: Float[Array, " n"]) -> Float[Array, " n"]:
    """Shift and scale to mean 0 and standard deviation 1."""
    spread = jnp.std(gains)
    return (gains - jnp.mean(gains)) / jnp.where(spread > 0, spread, 1)
