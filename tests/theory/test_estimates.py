"""Estimated constants, and what `from_theory` cannot know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support.logistic import SIZE, benefit, cost, random_problem


def test_estimates_of_a_stochastic_problem():
    problem = fs.problems.neyman_pearson(clients=5, radius=2.0, level=0.3, batch_size=4)
    seen = fs.theory.estimate(problem, points=16, draws=4)
    rows = np.concatenate([v.reshape(-1, 30) for v in problem.samples.values.values()])
    assert 0 < seen.lipschitz < np.linalg.norm(rows, axis=1).max()  # |logistic'| < 1
    assert 0 < seen.gradient_noise < 2 * np.linalg.norm(rows, axis=1).max()
    assert seen.constraint_noise > 0
    assert seen.lowest_constraint < 0
    algorithm = fs.FedSGM.from_theory(problem, 100, participants=3, points=16)
    assert "Theorem 9" in algorithm.guarantee.theorem
    assert sum("is an estimate" in s for s in algorithm.guarantee.unchecked) == 4
    with pytest.raises(fs.InvalidInput, match="No theorem covers compression where gradients"):
        fs.FedSGM.from_theory(problem, 100, points=16, uplink=fs.TopK(0.5))
    with pytest.raises(fs.InvalidInput, match="Give both, or neither"):  # σ_b/√N_b over √N_b
        fs.FedSGM.from_theory(problem, 100, points=16, constraint_batch=4)


def test_from_theory_raises_for_unknown_constants():
    unbounded = fs.problems.neyman_pearson(clients=5)
    with pytest.raises(fs.InvalidInput, match="D is unknown: give distance"):
        fs.FedSGM.from_theory(unbounded, 100)
    with pytest.raises(fs.InvalidInput, match="X is unbounded: give a radius"):
        fs.theory.estimate(unbounded)
    made = fs.FedSGM.from_theory(unbounded, 100, distance=3.0, lipschitz=4.0, uplink=fs.TopK(0.5))
    assert not any("R^d" in sentence for sentence in made.guarantee.unchecked)  # it is R^d
    with pytest.raises(fs.InvalidInput, match="X is all of R\\^d: give distance"):
        fs.theory.optimum(unbounded)
    data = {"x": np.ones((2, 3, SIZE)), "z": np.ones((2, 3, SIZE))}
    several = fs.Problem(benefit, data, np.zeros(SIZE), fs.Maximum(cost, cost), fs.Ball(1.0))
    assert fs.FedSGM.from_theory(several, 100).guarantee is not None  # a maximum of convex ones
    with pytest.raises(fs.InvalidInput, match="participants is 9, but there are only 8"):
        fs.FedSGM.from_theory(random_problem(0), 100, participants=9)
    impossible = fs.Problem(benefit, data, np.zeros(SIZE), lambda w, d: w @ w + 1, fs.Ball(1.0))
    with pytest.raises(fs.InvalidInput, match="No point with g < 0 was found"):
        fs.theory.optimum(impossible)
    with pytest.raises(fs.InvalidInput, match="of another only its projection is known"):
        fs.theory.optimum(only_projected(random_problem(0)), 1e-6)


def test_problems_that_draw_their_data_raise():
    class Drawn(fs.Problem):
        def values(self, w, samples, key):
            return {"objective": jax.random.normal(key)}

    drawn = Drawn(benefit, random_problem(0).samples, np.zeros(SIZE), cost, fs.Ball(1.0))
    for theory in (
        lambda: fs.theory.estimate(drawn),
        lambda: fs.theory.optimum(drawn),
        lambda: fs.theory.skewness(drawn, drawn.params),
        lambda: fs.FedSGM.from_theory(drawn, 10),
    ):
        with pytest.raises(fs.InvalidInput, match="Drawn draws its own data"):
            theory()


def only_projected(problem):
    """The same problem with a domain of which only the projection is known."""
    data = problem.samples.values
    return fs.Problem(benefit, data, np.zeros(SIZE), cost, lambda w: jnp.clip(w, -1, 1))
