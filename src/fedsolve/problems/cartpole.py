"""A constrained Markov decision process: CartPole with prohibited areas (FedSGM, section 4 and
appendix F.1).

A cart balances a pole by a continuous force, for at most 200 steps. Every step gives reward 1, and
costs 1 if the cart is in a prohibited area or the pole leans by more than 6°. Client i has its own
budget d_i for the cost of an episode:

    f_i(w) = −E[reward],   g_i(w) = E[cost] − d_i,

with w the parameters of the policy. A client's data are trajectories: every round it draws 1000
steps with its own key, judges them by its own value networks, which it then trains, and follows the
trust-region step for the mixed advantages (1 − σ) A_reward − σ A_cost (`fedsolve.trpo`). The
negative of that step is the direction that an algorithm sees, so a step size of 1 is TRPO's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples, as_samples
from fedsolve.problems import trpo
from fedsolve.types import PRNGKey, Vector

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FAR, STEEP, LEANING = 2.4, np.deg2rad(12), np.deg2rad(6)
PROHIBITED = (-2.4, -2.2), (-1.3, -1.1), (-0.1, 0.1), (1.1, 1.3), (2.2, 2.4)
UNITS = 0.5, 1.0, 0.125, 1.0  # bring position, speed, angle, turn to order 1

States = Float[Array, "*batch 4"]  # position, speed, angle, angular speed


# The environment


def move(states: States, forces: Float[Array, "*batch"]) -> States:
    """The states after 0.02 s, by Euler's method."""
    x, speed, angle, turn = jnp.moveaxis(states, -1, 0)
    cosine, sine, mass = jnp.cos(angle), jnp.sin(angle), CART + POLE
    push = (forces + POLE * HALF_LENGTH * turn**2 * sine) / mass
    swing = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE * cosine**2 / mass))
    pull = push - POLE * HALF_LENGTH * swing * cosine / mass
    moved = x + SECONDS * speed, speed + SECONDS * pull, angle + SECONDS * turn
    return jnp.stack([*moved, turn + SECONDS * swing], axis=-1)


def fallen(states: States) -> Bool[Array, "*batch"]:
    """Whether the cart has left the track or the pole has fallen."""
    return (jnp.abs(states[..., 0]) > FAR) | (jnp.abs(states[..., 2]) > STEEP)


def costs(states: States) -> Bool[Array, "*batch"]:
    """Whether the cart is in a prohibited area, or the pole leans by more than 6°."""
    x = states[..., 0, None]
    left, right = jnp.asarray(PROHIBITED, states.dtype).T
    inside = jnp.any((x >= left) & (x <= right), axis=-1)
    return inside | (jnp.abs(states[..., 2]) > LEANING)


def scaled(states: States) -> States:
    """The states as networks see them."""
    return states / jnp.asarray(UNITS, states.dtype)


def policy(layers: list[dict], states: States) -> trpo.Normal:
    """The distribution of the action, of standard deviation e^−3 to e; the force is 10 times the
    action, held within ±10."""
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
        """The expected sum of the amounts over an episode.

        Episodes that the batch cuts off are neither left out (the finished ones are the short ones)
        nor taken for whole: what happens k steps after a beginning is averaged over all episodes
        that began at least k steps before the batch ends.
        """
        begun = jnp.cumsum(jnp.sum(self.ages == 0, axis=1))
        return jnp.sum(amounts / begun[len(begun) - 1 - self.ages])

    def in_first(self) -> Bool[Array, "steps environments"]:
        """The steps of each environment's first episode; a whole one if there are enough steps."""
        return jnp.cumsum(self.ended, axis=0) - self.ended == 0


def draw(
    layers: list[dict], key: Key[Array, ""], environments: int, steps: int, horizon: int
) -> Trajectories:
    """Plays the policy for that many steps in each of some environments."""
    dtype = layers[0]["weight"].dtype
    to_begin, to_begin_again, to_act = jax.random.split(key, 3)
    begin = jax.random.uniform(to_begin, (environments, 4), dtype, -0.05, 0.05)
    again = jax.random.uniform(to_begin_again, (steps, environments, 4), dtype, -0.05, 0.05)
    noise = jax.random.normal(to_act, (steps, environments), dtype)

    def play(now: tuple[Any, Any], chance: tuple[Any, Any]) -> tuple[tuple, tuple]:
        (states, ages), (fresh, normal) = now, chance
        distribution = policy(layers, states)
        actions = distribution[0] + jnp.exp(distribution[1]) * normal
        moved = move(states, FORCE * jnp.clip(actions, -1, 1))
        ended = fallen(moved) | (ages + 1 >= horizon)
        seen = states, ages, actions, trpo.log_density(distribution, actions)
        following = jnp.where(ended[:, None], fresh, moved), jnp.where(ended, 0, ages + 1)
        return following, (*seen, costs(moved).astype(dtype), ended)

    first = begin, jnp.zeros(environments, jnp.int32)
    last, (states, ages, actions, densities, cost, ended) = lax.scan(play, first, (again, noise))
    return Trajectories(states, ages, actions, densities, cost, ended, last)


# The client


class Batch(eqx.Module):
    """The steps of a round, with the advantages of reward and cost, on a flat axis."""

    states: Float[Array, "n 4"]
    actions: Float[Array, " n"]
    log_densities: Float[Array, " n"]
    advantages: Float[Array, "n 2"]
    round: Int[Array, ""]


class Memory(eqx.Module):
    """What a client keeps: value networks of reward and cost (on a leading axis), their
    optimiser's state, and its latest steps."""

    values: PyTree
    optimiser: PyTree
    batch: Batch


class Agent(Client):
    """A client that draws its data by playing the policy."""

    _problem: CartPole

    def objective(self, w: Float[Array, " d"], key: Any = None) -> Float[Array, ""]:
        trajectories = self._problem.play(w, self.key if key is None else key)
        return -trajectories.per_episode(jnp.ones_like(trajectories.costs))

    def constraint(
        self, w: Float[Array, " d"], focus: PyTree = None, key: Any = None
    ) -> Float[Array, ""]:
        trajectories = self._problem.play(w, self.key if key is None else key)
        return trajectories.per_episode(trajectories.costs) - self._samples.values["budget"]

    def measure(self, w: Float[Array, " d"], key: Any = None) -> Float[Array, ""]:
        """Plays, learns the values, and keeps the steps for `direction`."""
        trajectories = self._problem.play(w, self.key if key is None else key)
        self.remember(self._problem.learn(self.memory, trajectories, self.round))
        return trajectories.per_episode(trajectories.costs) - self._samples.values["budget"]

    def grad(self, w: Float[Array, " d"], key: Any = None) -> Float[Array, " d"]:
        """The direction for the reward alone, from steps drawn for it."""
        return self._drawn_direction(w, 0.0, key)

    def constraint_grad(
        self, w: Float[Array, " d"], focus: PyTree = None, key: Any = None
    ) -> Float[Array, " d"]:
        """The direction for the cost alone, from steps drawn for it."""
        return self._drawn_direction(w, 1.0, key)

    def direction(
        self, w: Float[Array, " d"], sigma: Any, focus: PyTree = None, key: Any = None
    ) -> Float[Array, " d"]:
        """From the steps that this round's `measure` drew; 0 if its reply was lost, and the steps
        with it. At another w than theirs (after local steps) they are weighted by how much more
        likely its policy makes them."""
        batch = self.memory.batch
        return jnp.where(batch.round == self.round, 1, 0) * self._problem.descent(w, batch, sigma)

    def _drawn_direction(self, w: Any, sigma: float, key: Any) -> Float[Array, " d"]:
        trajectories = self._problem.play(w, self.key if key is None else key)
        batch = self._problem.judged(self.memory.values, trajectories, self.round)
        return self._problem.descent(w, batch, sigma)


# The problem


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The problem as plain functions of (params, data), by episodes drawn with one fixed key."""

    environments: int
    horizon: int
    of_cost: bool

    def __call__(self, layers: list[dict], data: dict[str, Array]) -> Float[Array, ""]:
        key = jax.random.key(0)
        played = draw(layers, key, self.environments, self.horizon, self.horizon)
        if self.of_cost:
            return jnp.sum(played.costs * played.in_first()) / self.environments - data["budget"]
        return -jnp.sum(played.in_first()) / jnp.asarray(self.environments, played.costs.dtype)


class CartPole(Problem):
    """See `fedsolve.problems.cartpole`."""

    radius: Any
    discount: Any
    trace: Any
    damping: Any
    value_rate: Any
    networks: PyTree  # value networks to start from, of reward and cost on a leading axis
    scaling: str = eqx.field(static=True)
    environments: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)
    evaluation_episodes: int = eqx.field(static=True)
    value_steps: int = eqx.field(static=True)
    thin: int = eqx.field(static=True)

    def __init__(self, objective: Any, clients: Any, params: Any, constraint: Any, **own: Any):
        super().__init__(objective, clients, params, constraint)
        for name, value in own.items():
            setattr(self, name, value)

    def client(
        self,
        samples: Samples,
        w: Vector,
        round: Int[Array, ""],
        index: Int[Array, ""],
        key: PRNGKey,
        memory: PyTree = None,
        /,
    ) -> Agent:
        """Make an agent, a client that draws its data by playing the policy."""
        return Agent(self, samples, w, round, index, key, memory)

    def init_memory(self) -> Memory:
        networks = jax.tree.map(jnp.asarray, self.networks)
        dtype, steps = self.start().dtype, self.environments * self.horizon
        one = jnp.zeros(steps, dtype)
        never = jnp.int32(-1)
        batch = Batch(jnp.zeros((steps, 4), dtype), one, one, jnp.zeros((steps, 2), dtype), never)
        return Memory(networks, self._optimiser().init(networks), batch)

    def values(self, w: Float[Array, " d"], samples: Samples, key: Any) -> dict[str, PyTree]:
        """Reward and cost of whole episodes, drawn for this evaluation."""
        layers = self.layout.unravel(w)
        played = draw(layers, key, self.evaluation_episodes, self.horizon, self.horizon)
        counted = played.in_first().astype(w.dtype)
        reward, cost = (
            jnp.sum(amount) / self.evaluation_episodes
            for amount in (counted, counted * played.costs)
        )
        budget = samples.values["budget"]
        return {"objective": -reward, "constraint": cost - budget, "reward": reward, "cost": cost}

    def with_clients(self, clients: PyTree) -> CartPole:
        return eqx.tree_at(lambda p: p.samples, self, as_samples(clients))

    # What agents do with their trajectories

    def play(self, w: Float[Array, " d"], key: Key[Array, ""]) -> Trajectories:
        """A round's steps of one client."""
        layers = self.layout.unravel(w)
        return draw(layers, key, self.environments, self.horizon, self.horizon)

    def judged(self, networks: PyTree, played: Trajectories, round: Any) -> Batch:
        """The steps with their advantages, by those value networks."""
        values, last = (
            self._value(networks, *place) for place in ((played.states, played.ages), played.last)
        )
        amounts = jnp.stack([jnp.ones_like(played.costs), played.costs])
        gains = jax.vmap(trpo.advantages, in_axes=(0, 0, 0, None, None, None))(
            amounts, values, last, played.ended, self.discount, self.trace
        )
        return Batch(
            played.states.reshape(-1, 4),
            played.actions.ravel(),
            played.log_densities.ravel(),
            gains.reshape(2, -1).T,
            round,
        )

    def learn(self, memory: Memory, played: Trajectories, round: Any) -> Memory:
        """The steps with their advantages, and the value networks trained on them."""
        batch = self.judged(memory.values, played, round)
        places = batch.states, played.ages.ravel()
        targets = self._value(memory.values, *places) + batch.advantages.T
        quarter = jnp.arange(len(batch.states) // 4) * 4

        def loss(networks: PyTree, rows: Any) -> Float[Array, ""]:
            values = self._value(networks, *jax.tree.map(lambda leaf: leaf[rows], places))
            return jnp.sum(jnp.mean((values - targets[:, rows]) ** 2, axis=1)) / self.horizon

        def train(number: Any, carry: tuple) -> tuple:
            networks, state = carry
            slope = jax.grad(loss)(networks, quarter + number % 4)
            change, state = self._optimiser().update(slope, state)
            return optax.apply_updates(networks, change), state

        start = memory.values, memory.optimiser
        networks, state = lax.fori_loop(0, self.value_steps, train, start)
        return Memory(networks, state, batch)

    def descent(self, w: Float[Array, " d"], batch: Batch, sigma: Any) -> Float[Array, " d"]:
        """Minus the trust-region step for (1 − σ) A_reward − σ A_cost."""
        reward, cost = batch.advantages.T
        if self.scaling == "separate":
            reward, cost = trpo.standardised(reward), trpo.standardised(cost)
        return -trpo.step(
            lambda w, states: policy(self.layout.unravel(w), states),
            w,
            batch.states,
            batch.actions,
            batch.log_densities,
            trpo.standardised((1 - sigma) * reward - sigma * cost),
            radius=self.radius,
            damping=self.damping,
            thin=self.thin,
        )

    def _value(self, networks: PyTree, states: States, ages: Int[Array, "*batch"]) -> Any:
        """V of reward and cost on a leading axis; what is still to come depends on the time."""
        time = (ages / self.horizon).astype(states.dtype)
        inputs = jnp.concatenate([scaled(states), time[..., None]], axis=-1)
        return (
            self.horizon / 4 * jax.vmap(trpo.forward, in_axes=(0, None))(networks, inputs)[..., 0]
        )

    def _optimiser(self) -> optax.GradientTransformation:
        return optax.adam(self.value_rate)


def cartpole(
    clients: int = 10,
    budgets: Sequence[float] = (25.0, 35.0),
    steps: int = 1000,
    horizon: int = 200,
    hidden: Sequence[int] = (128, 128),
    log_std: float = -0.7,
    radius: float = 0.02,
    discount: float = 1.0,
    trace: float = 0.97,
    damping: float = 0.1,
    scaling: str = "common",
    value_hidden: Sequence[int] = (64, 64),
    value_rate: float = 0.003,
    value_steps: int = 40,
    thin: int = 5,
    evaluation_episodes: int = 10,
    seed: int = 0,
) -> Problem:
    """CartPole with prohibited areas, a continuous force, and a budget for the cost of an episode.

    - `budgets`: the clients' budgets d_i are evenly spaced between these two.
    - `steps`: of data, for a client and a round; `horizon`: of an episode, at most.
    - `hidden`: of the policy, a tanh network from the state to mean and log standard deviation of
      the action, which is `log_std` at first. The default has 17,410 parameters.
    - `radius`: of the trust region, as mean KL divergence; `damping` of its Fisher matrix, for
      which every `thin`-th state is used.
    - `discount`, `trace`: γ and λ of the generalised advantages.
    - `scaling`: `"common"` mixes the advantages of reward and cost as they are, `"separate"`
      standardises each first.
    - `value_hidden`, `value_rate`, `value_steps`: the value networks and, for each round, their
      Adam steps.
    - `evaluation_episodes`: for a client and an evaluation.

    The history has `reward` and `cost` of an episode, averaged over all clients.
    """
    for name, count in {
        "clients": clients,
        "steps": steps,
        "horizon": horizon,
        "value_steps": value_steps,
        "thin": thin,
        "evaluation_episodes": evaluation_episodes,
    }.items():
        check_count(name, count)
    check_positive("radius", radius)
    if steps % horizon:
        raise InvalidInput(f"steps must be a multiple of horizon ({horizon}), got {steps}.")
    if scaling not in ("common", "separate"):
        raise InvalidInput(f'scaling must be "common" or "separate", got {scaling!r}.')
    least, most = budgets
    rng = np.random.default_rng(seed)
    layers = trpo.network(rng, [4, *hidden, 2], last=0.01)
    layers[-1]["bias"][1] = log_std
    nets = [trpo.network(rng, [5, *value_hidden, 1]) for _ in range(2)]
    environments = steps // horizon
    return CartPole(
        objective=Fixed(environments, horizon, of_cost=False),
        constraint=Fixed(environments, horizon, of_cost=True),
        clients={"budget": np.linspace(least, most, clients)},
        params=layers,
        radius=radius,
        discount=discount,
        trace=trace,
        damping=damping,
        scaling=scaling,
        networks=jax.tree.map(lambda *leaves: np.stack(leaves), *nets),
        value_rate=value_rate,
        value_steps=value_steps,
        thin=thin,
        environments=environments,
        horizon=horizon,
        evaluation_episodes=evaluation_episodes,
    )
