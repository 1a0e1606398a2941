"""ε against closed forms and published values."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

import fedsolve as fs
from fedsolve.privacy.accounting import Accountant, Sampling, curve, least_scale, together

pytest.importorskip("dp_accounting")

WHOLE = Sampling("none", 100, 100)


def exact_epsilon(multiplier, delta):
    """Balle and Wang (2018), Theorem 8: the smallest ε of one Gaussian mechanism."""

    def excess(epsilon):
        a, b = 1 / (2 * multiplier), epsilon * multiplier
        return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b) - delta

    return brentq(excess, 0, 500)


@pytest.mark.parametrize("multiplier", [0.7, 2.0, 10.0])
@pytest.mark.parametrize("rounds", [1, 30])
def test_distributions_give_the_exact_epsilon_of_gaussian_mechanisms(multiplier, rounds):
    # T Gaussian mechanisms are one with the multiplier z/√T.
    exact = exact_epsilon(multiplier / math.sqrt(rounds), 1e-5)
    by_distributions = Accountant(multiplier, math.inf, WHOLE, 1e-5, "pld").epsilon(rounds, 0)
    by_divergences = Accountant(multiplier, math.inf, WHOLE, 1e-5).epsilon(rounds, 0)
    assert by_distributions == pytest.approx(exact, rel=2e-3)
    assert exact < by_divergences < 1.35 * exact


# (samples, batch, noise, steps, δ) and the ε that is published for it by the older conversion from
# Rényi divergences; the conversion of Canonne, Kamath and Steinke (2020) gives somewhat less.
PUBLISHED = {
    # Abadi et al. (2016), section 5: q = 0.01, σ = 4, T = 10000
    "moments accountant": (10_000, 100, 4.0, 10_000, 1e-5, 1.26),
    # TensorFlow Privacy's tutorial on MNIST: three settings of its README
    "TensorFlow Privacy, 15 epochs": (60_000, 256, 1.3, 15 * 60_000 // 256, 1e-5, 1.19),
    "TensorFlow Privacy, 60 epochs": (60_000, 256, 1.1, 60 * 60_000 // 256, 1e-5, 3.01),
    "TensorFlow Privacy, 45 epochs": (60_000, 256, 0.7, 45 * 60_000 // 256, 1e-5, 7.10),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_poisson_sampling_agrees_with_published_values(name):
    samples, batch, noise, steps, delta, published = PUBLISHED[name]
    found = Accountant(noise, math.inf, Sampling("poisson", samples, batch), delta)
    assert 0.75 * published < found.epsilon(steps, 0) <= published


def test_cohorts_of_everyone_are_no_sampling():
    for kind in ("fixed", "poisson"):
        np.testing.assert_allclose(curve(3.0, Sampling(kind, 10, 10)), curve(3.0, WHOLE))


def test_smaller_cohorts_cost_less():
    for kind in ("fixed", "poisson"):
        costs = [
            Accountant(2.0, math.inf, Sampling(kind, 100, m), 1e-5).epsilon(50, 0)
            for m in (5, 20, 50, 100)
        ]
        assert costs == sorted(costs)
        assert costs[0] < 0.5 * costs[-1]


def test_small_cohorts_of_fixed_size_cost_as_theory_says():
    # Wang, Balle and Kasiviswanathan (2019), Theorem 9, at α = 2:
    # ρ ≤ log(1 + q² min(4(e^ρ(2) − 1), 2e^ρ(2))), and their bound for Gaussians is not larger.
    q, z = 0.1, 1.5
    whole = 2 / (2 * z**2)
    bound = math.log1p(q**2 * min(4 * math.expm1(whole), 2 * math.exp(whole)))
    at_two = curve(z, Sampling("fixed", 100, 10))[3]
    assert 0.2 * bound < at_two <= bound * (1 + 1e-9)


def test_sums_of_a_round_compose():
    assert together([3.0, 4.0]) == pytest.approx(1 / math.sqrt(1 / 9 + 1 / 16))
    assert together([]) == math.inf


def test_rounds_and_evaluations_add_up():
    found = Accountant(4.0, 8.0, WHOLE, 1e-5)
    assert found.epsilon(0, 0) == 0
    assert found.epsilon(4, 0) == pytest.approx(found.epsilon(0, 16))
    assert found.epsilon(3, 4) == pytest.approx(found.epsilon(4, 0))


def test_the_affordable_rounds_are_the_most_that_fit():
    found = Accountant(4.0, 8.0, WHOLE, 1e-5)
    most = found.affordable(3.0, 1000, lambda r: r)
    assert found.epsilon(most, most) <= 3.0 < found.epsilon(most + 1, most + 1)
    assert found.affordable(1e-3, 1000, lambda r: r) == 0


def test_the_least_scale_meets_the_budget():
    scale = least_scale(2.0, lambda s: Accountant(s, math.inf, WHOLE, 1e-5).epsilon(10, 0))
    assert Accountant(scale, math.inf, WHOLE, 1e-5).epsilon(10, 0) == pytest.approx(2.0, rel=3e-3)
    assert Accountant(scale, math.inf, WHOLE, 1e-5).epsilon(10, 0) <= 2.0


def test_distributions_refuse_cohorts_of_a_fixed_size():
    with pytest.raises(fs.InvalidInput, match="no bound for cohorts of a fixed size"):
        Accountant(1.0, 1.0, Sampling("fixed", 10, 2), 1e-5, "pld")
