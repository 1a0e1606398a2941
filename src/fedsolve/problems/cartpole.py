"""A constrained Markov decision process: CartPole with prohibited areas.

Source: FedSGM, section 4 and appendix F.1.

A cart balances a pole by a continuous force, for at most 200 steps. Every step gives reward 1, and
costs 1 if the cart is in a prohibited area or the pole leans by more than 6°. Client i has a budget
d_i for the cost of an episode:

    f_i(w) = −E[reward],   g_i(w) = E[cost] − d_i,

with w the parameters of the policy. A client's data are trajectories: every round it draws 1000
steps with its own key, evaluates them by its value networks, which it then trains, and follows the
trust-region step for the mixed advantages (1 − σ) A_reward − σ A_cost (`trpo`). The negative of
that step is the direction that an algorithm sees, so a step size of 1 is TRPO's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.problem.stacking import as_samples
from fedsolve.problems import trpo
from fedsolve.problems.cartpole_environment import States, Trajectories, draw, policy, scaled
from fedsolve.types import Number, PRNGKey, Vector


class Batch(eqx.Module):
    """The steps of a round, with the advantages of reward and cost, on a flat axis."""

    states: Float[Array, "n 4"]
    actions: Float[Array, " n"]
    log_densities: Float[Array, " n"]
    advantages: Float[Array, "n 2"]
    round: Int[Array, ""]


class Memory(eqx.Module):
    """What a client keeps between rounds.

    Args:
        values: The value networks of reward and cost, on a leading axis.
        optimiser: The state of their optimiser.
        batch: The client's latest steps.
    """

    values: PyTree
    optimiser: PyTree
    batch: Batch


class Agent(Client):
    """A client that draws its data by playing the policy."""

    _problem: CartPole

    def objective(self, w: Vector, key: PRNGKey | None = None) -> Float[Array, ""]:
        """Estimate −E[reward] from steps drawn for it."""
        trajectories = self._play(w, key)
        return -trajectories.per_episode(jnp.ones_like(trajectories.costs))

    def constraint(
        self, w: Vector, *, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Float[Array, ""]:
        """Estimate E[cost] − d_i from steps drawn for it."""
        return self._excess(self._play(w, key))

    def measure(self, w: Vector, key: PRNGKey | None = None) -> Float[Array, ""]:
        """Estimate the constraint, train the value networks, and keep the steps for `direction`."""
        trajectories = self._play(w, key)
        self.remember(self._problem.learn(self.memory, trajectories, self.round))
        return self._excess(trajectories)

    def grad(self, w: Vector, key: PRNGKey | None = None) -> Vector:
        """Compute the direction for the reward alone, from steps drawn for it."""
        return self._drawn_direction(w, 0.0, key)

    def constraint_grad(
        self, w: Vector, *, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Vector:
        """Compute the direction for the cost alone, from steps drawn for it."""
        return self._drawn_direction(w, 1.0, key)

    def direction(
        self, w: Vector, sigma: Number | int, focus: PyTree = None, key: PRNGKey | None = None
    ) -> Vector:
        """Compute the direction from the steps that this round's `measure` drew.

        It is 0 if the reply to `measure` was lost, and the steps with it. At another w than theirs
        (after local steps) they are weighted by the ratio of the policies' densities.
        """
        batch = self.memory.batch
        return jnp.where(batch.round == self.round, 1, 0) * self._problem.descent(w, batch, sigma)

    def _play(self, w: Vector, key: PRNGKey | None) -> Trajectories:
        """Draw a round's steps."""
        return self._problem.play(w, self.key if key is None else key)

    def _excess(self, trajectories: Trajectories) -> Float[Array, ""]:
        """Estimate the cost of an episode less this client's budget."""
        return trajectories.per_episode(trajectories.costs) - self._samples.values["budget"]

    def _drawn_direction(self, w: Vector, sigma: float, key: PRNGKey | None) -> Vector:
        """Compute the direction from new steps."""
        batch = self._problem.evaluated(self.memory.values, self._play(w, key), self.round)
        return self._problem.descent(w, batch, sigma)


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The problem as plain functions of (params, data), by episodes drawn with one fixed key."""

    environments: int
    horizon: int
    of_cost: bool

    def __call__(self, layers: list[trpo.Layer], data: dict[str, Array]) -> Float[Array, ""]:
        """Compute minus the mean reward, or the mean cost less the budget."""
        key = jax.random.key(0)
        played = draw(layers, key, self.environments, self.horizon, self.horizon)
        if self.of_cost:
            return jnp.sum(played.costs * played.in_first()) / self.environments - data["budget"]
        return -jnp.sum(played.in_first()) / jnp.asarray(self.environments, played.costs.dtype)


class CartPole(Problem):
    """The problem that `cartpole` returns."""

    radius: Number
    discount: Number
    trace: Number
    damping: Number
    value_rate: float | Float[Array, ""]
    networks: PyTree  # value networks to start from, of reward and cost on a leading axis
    scaling: str = eqx.field(static=True)
    environments: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)
    evaluation_episodes: int = eqx.field(static=True)
    value_steps: int = eqx.field(static=True)
    thin: int = eqx.field(static=True)

    def __init__(
        self,
        objective: Callable,
        clients: PyTree,
        params: PyTree,
        constraint: Callable,
        **own: object,
    ):
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
        """Return the initial value networks and a batch without steps."""
        networks = jax.tree.map(jnp.asarray, self.networks)
        dtype, steps = self.start().dtype, self.environments * self.horizon
        one = jnp.zeros(steps, dtype)
        never = jnp.int32(-1)
        batch = Batch(jnp.zeros((steps, 4), dtype), one, one, jnp.zeros((steps, 2), dtype), never)
        return Memory(networks, self._optimiser().init(networks), batch)

    def values(
        self, w: Vector, samples: Samples, key: PRNGKey | None, kept: PyTree = None
    ) -> dict[str, PyTree]:
        """Compute reward and cost of complete episodes, drawn for this evaluation."""
        assert key is not None
        layers = self.params_at(w)
        played = draw(layers, key, self.evaluation_episodes, self.horizon, self.horizon)
        counted = played.in_first().astype(w.dtype)
        reward, cost = (
            jnp.sum(amount) / self.evaluation_episodes
            for amount in (counted, counted * played.costs)
        )
        budget = samples.values["budget"]
        return {"objective": -reward, "constraint": cost - budget, "reward": reward, "cost": cost}

    def with_clients(self, clients: PyTree) -> CartPole:
        """Return the same problem with other budgets."""
        return eqx.tree_at(lambda p: p.samples, self, as_samples(clients))

    # What agents do with their trajectories

    def play(self, w: Vector, key: PRNGKey) -> Trajectories:
        """Draw a round's steps of one client."""
        layers = self.params_at(w)
        return draw(layers, key, self.environments, self.horizon, self.horizon)

    def evaluated(self, networks: PyTree, played: Trajectories, round: Int[Array, ""]) -> Batch:
        """Return the steps with their advantages, by these value networks."""
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

    def learn(self, memory: Memory, played: Trajectories, round: Int[Array, ""]) -> Memory:
        """Return the steps with their advantages, and the value networks trained on them."""
        batch = self.evaluated(memory.values, played, round)
        places = batch.states, played.ages.ravel()
        targets = self._value(memory.values, *places) + batch.advantages.T
        quarter = jnp.arange(len(batch.states) // 4) * 4

        def loss(networks: PyTree, rows: Int[Array, " rows"]) -> Float[Array, ""]:
            values = self._value(networks, *jax.tree.map(lambda leaf: leaf[rows], places))
            return jnp.sum(jnp.mean((values - targets[:, rows]) ** 2, axis=1)) / self.horizon

        def train(number: Int[Array, ""], carry: tuple) -> tuple:
            networks, state = carry
            slope = jax.grad(loss)(networks, quarter + number % 4)
            change, state = self._optimiser().update(slope, state)
            return optax.apply_updates(networks, change), state

        start = memory.values, memory.optimiser
        networks, state = lax.fori_loop(0, self.value_steps, train, start)
        return Memory(networks, state, batch)

    def descent(self, w: Vector, batch: Batch, sigma: Number | int) -> Vector:
        """Compute minus the trust-region step for (1 − σ) A_reward − σ A_cost."""
        reward, cost = batch.advantages.T
        if self.scaling == "separate":
            reward, cost = trpo.standardised(reward), trpo.standardised(cost)
        return -trpo.step(
            lambda w, states: policy(self.params_at(w), states),
            w,
            batch.states,
            batch.actions,
            batch.log_densities,
            trpo.standardised((1 - sigma) * reward - sigma * cost),
            radius=self.radius,
            damping=self.damping,
            thin=self.thin,
        )

    def _value(
        self, networks: PyTree, states: States, ages: Int[Array, "*batch"]
    ) -> Float[Array, "2 *batch"]:
        """Compute V of reward and cost, which depend on the state and on the time."""
        time = (ages / self.horizon).astype(states.dtype)
        inputs = jnp.concatenate([scaled(states), time[..., None]], axis=-1)
        return (
            self.horizon / 4 * jax.vmap(trpo.forward, in_axes=(0, None))(networks, inputs)[..., 0]
        )

    def _optimiser(self) -> optax.GradientTransformation:
        """Return the optimiser of the value networks."""
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
    """Balance a pole on a cart (CartPole), with a budget for the cost of an episode.

    The force is continuous, and steps in prohibited areas or with a leaning pole cost 1.

    The history has `reward` and `cost` of an episode, averaged over all clients.

    Args:
        clients: The number of clients.
        budgets: The least and the largest of the clients' budgets d_i, which are evenly spaced.
        steps: The steps that a client draws in a round, a multiple of `horizon`.
        horizon: The longest episode, in steps.
        hidden: The hidden layers of the policy, a tanh network from the state to mean and log
            standard deviation of the action. The default has 17,410 parameters.
        log_std: The initial log standard deviation.
        radius: The trust region's radius, as mean KL divergence.
        discount: γ of the generalised advantages.
        trace: λ of the generalised advantages.
        damping: The damping of the Fisher matrix.
        scaling: `"common"` mixes the advantages of reward and cost as they are, `"separate"`
            standardises each first.
        value_hidden: The hidden layers of the value networks.
        value_rate: The learning rate of the value networks.
        value_steps: The Adam steps of the value networks in a round.
        thin: The Fisher matrix uses every `thin`-th state.
        evaluation_episodes: The episodes of a client at an evaluation.
        seed: Seed of the initial networks.

    Returns:
        The problem. Its clients draw their data, so it has no stored samples but the budgets.

    Raises:
        InvalidInput: If a count or the radius is not positive, `steps` is not a multiple of
            `horizon`, or `scaling` is unknown.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.cartpole(clients=3, steps=8, horizon=4, hidden=(4,))
        >>> problem.n, problem.dimension, problem.samples.values["budget"].tolist()
        (3, 30, [25.0, 30.0, 35.0])
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
