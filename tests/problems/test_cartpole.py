"""Constrained CartPole: the environment against Gymnasium, TRPO's parts against dense algebra, and
the whole as a federated problem."""

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.problems import trpo
from fedsolve.problems.cartpole_environment import costs, draw, fallen, move, policy
from tests.support.conformance import assert_same


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def gym():
    return gymnasium.make("CartPole-v1").unwrapped


# The environment


def test_steps_are_gymnasiums():
    """Forces of ±10 and others, from states all over the track."""
    world, rng = gym(), np.random.default_rng(0)
    states = rng.uniform(-1, 1, (300, 4)) * [2.6, 3, 0.25, 3]
    forces = np.where(np.arange(300) < 150, 10.0, rng.uniform(0, 10, 300))
    actions = rng.integers(0, 2, 300)
    expected, ended = [], []
    for state, force, action in zip(states, forces, actions, strict=True):
        world.reset()
        world.state, world.force_mag = state, float(force)
        ended.append(world.step(int(action))[2])
        expected.append(world.state)
    moved = move(jnp.asarray(states), jnp.asarray(np.where(actions == 1, forces, -forces)))
    np.testing.assert_allclose(moved, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(fallen(moved), ended)
    assert 0.1 < np.mean(ended) < 0.9


def test_costs_are_the_papers_areas_and_six_degrees():
    x = jnp.asarray([0, 0.1, 0.11, 1.09, 1.1, 1.3, 1.31, 2.19, 2.2, 2.4, -0.05, -1.2, -1.0, -2.3])
    expected = [1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1]
    np.testing.assert_array_equal(costs(jnp.zeros((14, 4)).at[:, 0].set(x)), expected)
    angles = jnp.deg2rad(jnp.asarray([5.9, 6.1, -5.9, -6.1]))
    leaning = jnp.zeros((4, 4)).at[:, 0].set(0.5).at[:, 2].set(angles)
    np.testing.assert_array_equal(costs(leaning), [0, 1, 0, 1])


def small_policy(hidden=(6,), last=1.0):
    rng = np.random.default_rng(0)
    return jax.tree.map(jnp.asarray, trpo.network(rng, [4, *hidden, 2], last))


def test_trajectories_replayed_in_gymnasium():
    """Every episode of a batch, from its first state and by its own actions."""
    layers = small_policy()
    played = jax.tree.map(np.asarray, draw(layers, jax.random.key(3), 4, 60, horizon=25))
    world, ends = gym(), 0
    for e in range(4):
        for t in range(60):
            if played.ages[t, e] == 0:
                assert np.abs(played.states[t, e]).max() <= 0.05
                world.reset()
                world.state = played.states[t, e]
            np.testing.assert_allclose(world.state, played.states[t, e], atol=1e-9)
            action = np.clip(played.actions[t, e], -1, 1)
            world.force_mag = 10 * abs(action)
            fell = world.step(int(action > 0))[2]
            ended = fell or played.ages[t, e] == 24
            assert played.ended[t, e] == ended
            x, angle = world.state[0], world.state[2]
            areas = [(-2.4, -2.2), (-1.3, -1.1), (-0.1, 0.1), (1.1, 1.3), (2.2, 2.4)]
            bad = any(a <= x <= b for a, b in areas) or abs(angle) > np.pi / 30
            assert played.costs[t, e] == bad
            ends += ended
            if t < 59:
                assert played.ages[t + 1, e] == (0 if ended else played.ages[t, e] + 1)
    assert ends > 8
    mean, log_std = policy(layers, jnp.asarray(played.states))
    z = (played.actions - np.asarray(mean)) / np.exp(np.asarray(log_std))
    density = -0.5 * z**2 - np.asarray(log_std) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(played.log_densities, density, atol=1e-9)
    assert 0.7 < z.std() < 1.3


def test_the_estimate_for_an_episode_is_not_biased_by_cut_ones():
    """Batches in which episodes follow each other, against whole episodes."""
    batches, environments, horizon = 400, 2, 40
    keys = jax.random.split(jax.random.key(0), batches)
    layers = small_policy(last=0.01)

    @jax.jit
    @jax.vmap
    def both(key):
        played = draw(layers, key, environments, horizon, horizon)
        whole = played.in_first()
        ones = jnp.ones_like(played.costs)
        return (
            jnp.stack([played.per_episode(ones), played.per_episode(played.costs)]),
            jnp.stack([jnp.sum(whole), jnp.sum(whole * played.costs)]) / environments,
        )

    estimates, truths = map(np.asarray, both(keys))
    error = np.hypot(*(x.std(axis=0) / np.sqrt(batches) for x in (estimates, truths)))
    assert np.all(np.abs(estimates.mean(axis=0) - truths.mean(axis=0)) < 4 * error)
    assert np.all(estimates.std(axis=0) < truths.std(axis=0))


# TRPO


def test_advantages_follow_the_sum():
    rng = np.random.default_rng(0)
    steps, environments, discount, trace = 12, 3, 0.9, 0.8
    rewards, values = rng.standard_normal((2, steps, environments))
    last, ended = rng.standard_normal(environments), rng.random((steps, environments)) < 0.2
    got = trpo.advantages(*map(jnp.asarray, (rewards, values, last, ended)), discount, trace)
    for e in range(environments):
        for t in range(steps):
            total, weight = 0.0, 1.0
            for k in range(t, steps):
                after = values[k + 1, e] if k + 1 < steps else last[e]
                after = 0 if ended[k, e] else after
                total += weight * (rewards[k, e] + discount * after - values[k, e])
                weight *= discount * trace
                if ended[k, e]:
                    break
            np.testing.assert_allclose(got[t, e], total, atol=1e-12)


def flat_policy(hidden=(3,)):
    layers = small_policy(hidden)
    w, unravel = jax.flatten_util.ravel_pytree(layers)
    return w, lambda w, states: policy(unravel(w), states)


def test_fisher_product_is_the_hessian_of_the_divergence():
    w, normal = flat_policy()
    states = jnp.asarray(np.random.default_rng(1).uniform(-0.2, 0.2, (7, 4)))

    @jax.jit
    def both(w):
        dense = jax.hessian(
            lambda v: jnp.mean(trpo.divergence(normal(w, states), normal(v, states)))
        )(w)
        return dense, jax.vmap(trpo.fisher(lambda v: normal(v, states), w))(jnp.eye(len(w)))

    dense, got = both(w)
    np.testing.assert_allclose(got, dense, atol=1e-10)
    assert np.linalg.norm(dense) > 0.1


def test_divergence_is_the_integral():
    old, new = (jnp.asarray(0.3), jnp.asarray(-0.2)), (jnp.asarray(-0.1), jnp.asarray(0.4))
    grid = jnp.linspace(-12, 12, 20_001)
    p, q = trpo.log_density(old, grid), trpo.log_density(new, grid)
    integral = jnp.sum(jnp.exp(p) * (p - q)) * (grid[1] - grid[0])
    np.testing.assert_allclose(trpo.divergence(old, new), integral, rtol=1e-6)


def test_conjugate_gradients_solve():
    rng = np.random.default_rng(0)
    root = rng.standard_normal((8, 8))
    matrix, b = jnp.asarray(root @ root.T + np.eye(8)), jnp.asarray(rng.standard_normal(8))
    x, image = trpo.conjugate_gradients(lambda v: matrix @ v, b, 20)
    np.testing.assert_allclose(x, jnp.linalg.solve(matrix, b), atol=1e-7)
    np.testing.assert_allclose(image, b, atol=1e-7)


def test_a_step_stays_in_the_trust_region_and_improves():
    w, normal = flat_policy((16,))
    rng = np.random.default_rng(2)
    states = jnp.asarray(rng.uniform(-0.5, 0.5, (200, 4)))
    mean, log_std = normal(w, states)
    actions = mean + jnp.exp(log_std) * jnp.asarray(rng.standard_normal(200))
    densities = trpo.log_density((mean, log_std), actions)
    gains = jnp.asarray(rng.standard_normal(200)) + actions

    @jax.jit
    def step(gains, radius):
        return trpo.step(normal, w, states, actions, densities, gains, radius=radius, thin=3)

    for radius in (0.001, 0.05, 10.0):
        there = normal(w + step(gains, radius), states)
        apart = float(jnp.mean(trpo.divergence((mean, log_std), there)))
        gain = jnp.mean((jnp.exp(trpo.log_density(there, actions) - densities) - 1) * gains)
        assert 0 < apart <= radius
        assert gain > 0
        if radius < 1:
            assert apart > radius / 10
    np.testing.assert_array_equal(step(0 * gains, 0.05), 0)


# The problem


def tiny(**changes):
    options = {"clients": 3, "steps": 24, "horizon": 8, "hidden": (4,), "value_hidden": (3,)}
    return fs.problems.cartpole(**options | {"value_steps": 3, "thin": 2} | changes)


@pytest.mark.parametrize("scaling", ["common", "separate"])
def test_separate_scaling_does_not_depend_on_the_units_of_the_cost(scaling):
    """The cost's advantages in other units: the same step, unless reward and cost are mixed."""
    problem = fs.problems.cartpole(2, steps=100, horizon=50, hidden=(8,), scaling=scaling)
    w = problem.start()
    played = problem.play(w, jax.random.key(0))
    batch = problem.evaluated(problem.init_memory().values, played, jnp.int32(0))

    @jax.jit
    def step(sigma, unit):
        gains = batch.advantages * jnp.stack([1.0, unit])
        return problem.descent(w, eqx.tree_at(lambda b: b.advantages, batch, gains), sigma)

    for sigma in (0.0, 1.0):  # one of the two alone: always standardised
        np.testing.assert_allclose(step(sigma, 10.0), step(sigma, 1.0), rtol=1e-6, atol=1e-9)
    mixed, other = step(0.5, 1.0), step(0.5, 10.0)
    assert jnp.any(mixed != 0)
    assert np.allclose(mixed, other, rtol=1e-6) == (scaling == "separate")


def test_the_papers_sizes():
    problem = fs.problems.cartpole()
    assert problem.size == 17_410
    budgets = problem.samples.values["budget"]
    assert (len(budgets), budgets.min(), budgets.max(), budgets.mean()) == (10, 25, 35, 30)
    assert problem.environments * problem.horizon == 1000
    mean, log_std = policy(jax.tree.map(jnp.asarray, problem.params), jnp.zeros((1, 4)))
    np.testing.assert_allclose([mean[0], log_std[0]], [0, -0.7], atol=1e-12)


ALGORITHM = fs.FedSGM(
    1.0, 1.0, fs.Soft(0.1), participants=2, uplink=fs.TopK(0.5), downlink=fs.Float8()
)


@pytest.mark.slow
def test_compiled_is_debug_also_when_replies_are_lost():
    def sometimes(round, exchange, clients):
        return (round + exchange + jnp.asarray(clients)) % 4 != 0

    problem = tiny(budgets=(1.0, 3.0), steps=8, horizon=4, value_steps=1)
    options = {"rounds": 2, "seed": 1, "precision": "float64", "arrivals": sometimes}
    run = fs.solve(problem, ALGORITHM, **options)
    assert_same(run, fs.solve(problem, ALGORITHM, runtime="debug", **options), 1e-8)
    drawn = -np.ones(3, int)
    for round, cohort in enumerate(run.history["cohort"]):
        heard = np.asarray(sometimes(round, 0, cohort))
        drawn[cohort[heard]] = round
    np.testing.assert_array_equal(run.state.memory.batch.round, drawn)
    np.testing.assert_allclose(run.history["objective"], -run.history["reward"])
    np.testing.assert_allclose(run.history["constraint"], run.history["cost"] - 2)


KEY = jax.random.key(5)


def agent(problem, memory, round=0):
    own = jax.tree.map(lambda leaf: leaf[0], problem.samples)
    return problem.client(own, problem.start(), jnp.int32(round), jnp.int32(0), KEY, memory)


@eqx.filter_jit
def measured(problem, memory, key):
    client = agent(problem, memory)
    return client.measure(client.w, key), client.constraint(client.w, key=key), client.memory


@eqx.filter_jit
def direction(problem, memory, sigma, round):
    client = agent(problem, memory, round)
    return client.direction(client.w, sigma)


def test_a_client_steps_by_its_latest_measurement():
    problem = tiny().on_device(jnp.float64)
    w, memory = problem.start(), problem.init_memory()
    np.testing.assert_array_equal(direction(problem, memory, 0.5, 0), 0)  # nothing drawn yet
    told, value, after = measured(problem, memory, KEY)
    np.testing.assert_allclose(told, value)
    assert not eqx.tree_equal(memory.values, after.values)
    batch = after.batch
    for sigma in (0.0, 0.3, 1.0):
        there = w - direction(problem, after, sigma, 0)
        old, new = (policy(problem.layout.unravel(v), batch.states) for v in (w, there))
        assert 0 < jnp.mean(trpo.divergence(old, new)) <= problem.radius
        reward, cost = batch.advantages.T
        mixed = (1 - sigma) * reward - sigma * cost
        ratio = jnp.exp(trpo.log_density(new, batch.actions) - batch.log_densities)
        assert jnp.mean((ratio - 1) * (mixed - mixed.mean())) > 0
    np.testing.assert_array_equal(direction(problem, after, 0.5, 1), 0)  # those steps are old


def test_algorithms_that_do_not_measure_get_directions_from_steps_drawn_for_them():
    problem = tiny().on_device(jnp.float64)
    memory = problem.init_memory()

    @eqx.filter_jit
    def drawn(problem, memory, key):
        client = agent(problem, memory)
        w = client.w
        return client.objective(w, key), client.grad(w, key), client.constraint_grad(w, key=key)

    value, of_reward, of_cost = drawn(problem, memory, KEY)
    assert value <= -1
    assert jnp.linalg.norm(of_reward) > 0
    assert jnp.linalg.norm(of_cost) > 0
    _, _, after = measured(problem, memory, KEY)
    np.testing.assert_allclose(direction(problem, after, 0.0, 0), of_reward, atol=1e-9)
    np.testing.assert_allclose(direction(problem, after, 1.0, 0), of_cost, atol=1e-9)


def test_it_learns_and_the_same_seed_gives_the_same_bits():
    problem = fs.problems.cartpole(
        clients=3, steps=400, hidden=(32,), value_hidden=(16,), value_steps=20
    )
    algorithm = fs.FedSGM(1.0, 1000.0)  # never mind the cost
    one = fs.solve(problem, algorithm, rounds=15, seed=3, precision="float32", evaluate_every=5)
    assert one.history["reward"][-1] > 100 > 2 * 25
    again = fs.solve(problem, algorithm, rounds=15, seed=3, precision="float32", evaluate_every=5)
    assert_same(one, again)


def test_other_clients_are_other_budgets():
    problem = tiny().with_clients({"budget": np.asarray([1.0, 2.0])})
    assert problem.n == 2
    assert problem.horizon == 8


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": 30, "horizon": 8}, "steps must be a multiple of horizon"),
        ({"scaling": "none"}, 'scaling must be "common" or "separate"'),
        ({"radius": 0.0}, "radius must be positive"),
        ({"clients": 0}, "clients must be a whole number"),
    ],
)
def test_bad_input_raises(options, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        tiny(**options)
