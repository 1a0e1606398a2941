"""The environment of the CartPole problem: its dynamics, its policy, and drawn trajectories."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from fedsolve.problems import trpo
from fedsolve.types import PRNGKey

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FAR, STEEP, LEANING = 2.4, np.deg2rad(12), np.deg2rad(6)
PROHIBITED = (-2.4, -2.2), (-1.3, -1.1), (-0.1, 0.1), (1.1, 1.3), (2.2, 2.4)
UNITS = 0.5, 1.0, 0.125, 1.0  # bring position, speed, angle, turn to order 1

States = Float[Array, "*batch 4"]  # position, speed, angle, angular speed


def move(states: States, forces: Float[Array, "*batch"]) -> States:
    """Compute the states after 0.02 s, by Euler's method."""
    x, speed, angle, turn = jnp.moveaxis(states, -1, 0)
    cosine, sine, mass = jnp.cos(angle), jnp.sin(angle), CART + POLE
    push = (forces + POLE * HALF_LENGTH * turn**2 * sine) / mass
    swing = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / mass))
    pull = push - POLE * HALF_LENGTH * swing * cosine / mass
    moved = x + SECONDS * speed, speed + SECONDS * pull, angle + SECONDS * turn
    return jnp.stack([*moved, turn + SECONDS * swing], axis=-1)


def fallen(states: States) -> Bool[Array, "*batch"]:
    """Return whether the cart has left the track or the pole has fallen."""
    return (jnp.abs(states[..., 0]) > FAR) | (jnp.abs(states[..., 2]) > STEEP)


def costs(states: States) -> Bool[Array, "*batch"]:
    """Return whether the cart is in a prohibited area, or the pole leans by more than 6°."""
    x = states[..., 0, None]
    left, right = jnp.asarray(PROHIBITED, states.dtype).T
    inside = jnp.any((x >= left) & (x <= right), axis=-1)
    return inside | (jnp.abs(states[..., 2]) > LEANING)


def scaled(states: States) -> States:
    """Scale the states to order 1, the inputs of networks."""
    return states / jnp.asarray(UNITS, states.dtype)


def policy(layers: list[trpo.Layer], states: States) -> trpo.Normal:
    """Compute the distribution of the action, of standard deviation e^−3 to e.

    The force is 10 times the action, held within ±10.
    """
    mean, log_std = jnp.moveaxis(trpo.forward(layers, scaled(states)), -1, 0)
    return mean, jnp.clip(log_std, -3, 1)


class Trajectories(eqx.Module):
    """Steps of several environments, in each of which one episode follows the other."""

    states: Float[Array, "steps environments 4"]
    ages: Int[Array, "steps environments"]  # steps since the episode began
    actions: Float[Array, "steps environments"]
    log_densities: Float[Array, "steps environments"]
    costs: Float[Array, "steps environments"]
    ended: Bool[Array, "steps environments"]
    last: tuple[Float[Array, "environments 4"], Int[Array, " environments"]]

    def per_episode(self, amounts: Float[Array, "steps environments"]) -> Float[Array, ""]:
        """Estimate the expected sum of the amounts over an episode.

        Episodes that the batch cuts off are neither left out (the finished ones are the short ones)
        nor counted as complete: the amount k steps after a beginning is averaged over all episodes
        that began at least k steps before the batch ends.
        """
        begun = jnp.cumsum(jnp.sum(self.ages == 0, axis=1))
        return jnp.sum(amounts / begun[len(begun) - 1 - self.ages])

    def in_first(self) -> Bool[Array, "steps environments"]:
        """Return which steps are of each environment's first episode."""
        return jnp.cumsum(self.ended, axis=0) - self.ended == 0


def draw(
    layers: list[trpo.Layer], key: PRNGKey, environments: int, steps: int, horizon: int
) -> Trajectories:
    """Play the policy for `steps` steps in each of several environments."""
    dtype = layers[0]["weight"].dtype
    to_begin, to_begin_again, to_act = jax.random.split(key, 3)
    begin = jax.random.uniform(to_begin, (environments, 4), dtype, -0.05, 0.05)
    again = jax.random.uniform(to_begin_again, (steps, environments, 4), dtype, -0.05, 0.05)
    noise = jax.random.normal(to_act, (steps, environments), dtype)

    def play(
        now: tuple[States, Int[Array, "*batch"]], chance: tuple[States, Float[Array, "*batch"]]
    ) -> tuple[tuple, tuple]:
        (states, ages), (fresh, normal) = now, chance
        distribution = policy(layers, states)
        actions = distribution[0] + jnp.exp(distribution[1]) * normal
        moved = move(states, FORCE * jnp.clip(actions, -1, 1))
        ended = fallen(moved) | (ages + 1 >= horizon)
        step = states, ages, actions, trpo.log_density(distribution, actions)
        following = jnp.where(ended[:, None], fresh, moved), jnp.where(ended, 0, ages + 1)
        return following, (*step, costs(moved).astype(dtype), ended)

    first = begin, jnp.zeros(environments, jnp.int32)
    last, (states, ages, actions, densities, cost, ended) = lax.scan(play, first, (again, noise))
    return Trajectories(states, ages, actions, densities, cost, ended, last)
