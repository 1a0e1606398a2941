"""PPBC's theorems: formulas against transcriptions of their own, estimates, and runs that obey."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.theory.heterogeneity import corners

parts = fs.participation


def theorem_3_2(c, gamma, K):
    """Theorem D.2, term by term."""
    M, L, a, p, s2 = c["M"], c["L"], c["alpha"], c["p"], c["sigma"] ** 2
    return (
        16 * c["gap"] / (gamma * K)
        + 768 * gamma * L * a * c["d2"] / p
        + 384 * gamma**2 * L**2 * a * c["d2"] / p**3
        + 400 * gamma * L * a * s2 / (M * p)
        + 192 * gamma**2 * L**2 * a * s2 / (M * p**3)
    )


def theorem_e_2(c, gamma, K):
    L, a, p, s2, q = c["L"], c["alpha"], c["p"], c["sigma"] ** 2, c["q"]
    return (
        16 * c["gap"] / (gamma * K)
        + 1536 * gamma**2 * L**2 * a * c["d2"] / (p**3 * q)
        + 3200 * gamma * L * a * c["d2"] / (p * q)
        + 768 * gamma**2 * L**2 * a * s2 / (p**3 * q)
        + 1600 * gamma * L * a * s2 / (p * q)
    )


def theorem_3_4(c, gamma, K):
    """Going into the recursion of the proof of D.6, which is less than the closed form."""
    M, a, p, s2, mu = c["M"], c["alpha"], c["p"], c["sigma"] ** 2, c["mu"]
    each = gamma**2 * a / p**3 * (144 * c["d2"] + 74 * s2 / M)
    return np.exp(K * np.log1p(-gamma * mu / 8)) * c["distance"] ** 2 + each * 8 / (gamma * mu)


def theorem_e_6(c, gamma, K):
    each = 296 * gamma**2 * c["alpha"] / (c["p"] ** 3 * c["q"]) * (2 * c["d2"] + c["sigma"] ** 2)
    first = np.exp(K * np.log1p(-gamma * c["mu"] / 8)) * c["distance"] ** 2
    return first + each * 8 / (gamma * c["mu"])


LARGEST = {
    "PPBC, Theorem 3.2": lambda c: c["p"] / (384 * c["L"] * c["alpha"] * (c["d1"] + 1)),
    "PPBC+, Theorem E.2": lambda c: c["p"] * c["q"] / (768 * c["L"] * c["alpha"] * (c["d1"] + 1)),
    "PPBC, Theorem 3.4": lambda c: c["p"] ** 2 / (96 * c["L"] * c["alpha"] * (c["d1"] + 1)),
    "PPBC+, Theorem E.6": lambda c: (
        c["p"] ** 2 * c["q"] / (384 * c["L"] * c["alpha"] * (c["d1"] + 1))
    ),
}
BOUNDS = {
    "PPBC, Theorem 3.2": theorem_3_2,
    "PPBC+, Theorem E.2": theorem_e_2,
    "PPBC, Theorem 3.4": theorem_3_4,
    "PPBC+, Theorem E.6": theorem_e_6,
}


def drawn(rng):
    """Random constants, and the arguments that stand for them."""
    M = int(rng.integers(2, 40))
    C = int(rng.integers(1, M + 1))
    L = 10 ** rng.uniform(-2, 2)
    c = {
        "M": M,
        "C": C,
        "p": C / M if rng.random() < 0.5 else rng.uniform(0.05, 1.0),
        "L": L,
        "alpha": rng.uniform(1, M),
        "d1": rng.choice([0.0, rng.uniform(0, 5)]),
        "d2": rng.choice([0.0, 10 ** rng.uniform(-3, 2)]),
        "sigma": rng.choice([0.0, 10 ** rng.uniform(-3, 1)]),
        "q": rng.uniform(0.05, 1.0),
        "gap": 10 ** rng.uniform(-2, 2),
        "distance": 10 ** rng.uniform(-2, 2),
        "mu": L * 10 ** rng.uniform(-3, 0),
    }
    given = {
        "clients": M,
        "participants": C,
        "epoch_end": None if c["p"] == C / M else c["p"],
        "smoothness": L,
        "cap": c["alpha"],
        "delta_1": c["d1"],
        "delta_2": c["d2"],
        "noise": c["sigma"],
    }
    return c, given


def cases(c, given):
    rates = np.linspace(c["q"], 1, c["M"])[::-1]
    for plus in (False, True):
        for convex in (False, True):
            more = {"strong_convexity": c["mu"], "distance": c["distance"]}
            more = more if convex else {"gap": c["gap"]}
            yield given | more | ({"availability": rates} if plus else {})


def test_bounds_and_step_sizes_are_those_of_the_theorems():
    rng = np.random.default_rng(0)
    named = set()
    for _ in range(100):
        c, given = drawn(rng)
        K = int(10 ** rng.uniform(0, 9))
        for arguments in cases(c, given):
            found = fs.theory.ppbc(epochs=K, **arguments)
            named.add(found.theorem)
            largest, bound = LARGEST[found.theorem](c), BOUNDS[found.theorem]
            assert found.largest == pytest.approx(largest, rel=1e-12)
            assert 0 < found.step_size <= found.largest
            assert found.bound == pytest.approx(bound(c, found.step_size, K), rel=1e-9)
            theta = c["mu"] / 4 if "mu" in c and found.strongly_convex else c["L"] / 2
            assert found.momentum == pytest.approx(found.step_size * theta * c["p"] ** 2, rel=1e-12)
            assert found.momentum <= 0.25  # 1 − θ ≥ 1/2 in the proofs
            assert found.iterations == pytest.approx(K / c["p"])
            assert found.communications == pytest.approx(K * (c["C"] / c["p"] + c["M"]))
            tenth = fs.theory.ppbc(epochs=K, step_size=largest / 10, **arguments)
            assert tenth.bound == pytest.approx(bound(c, largest / 10, K), rel=1e-9)
            with pytest.raises(fs.InvalidInput, match="the largest allowed here"):
                fs.theory.ppbc(epochs=K, step_size=largest * 1.01, **arguments)
    assert named == set(BOUNDS)


def test_the_corollaries_step_size_balances_the_bound():
    """D.3's γ: no term is more than the first. D.7's: the first is at most the noise."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        c, given = drawn(rng)
        K = int(10 ** rng.uniform(2, 9))
        for arguments in cases(c, given):
            found = fs.theory.ppbc(epochs=K, **arguments)
            if not found.strongly_convex:
                first = 16 * c["gap"] / (found.step_size * K)
                assert found.bound <= 5 * first * (1 + 1e-9)
                if c["d2"] == c["sigma"] == 0:
                    assert found.step_size == found.largest
                    assert found.bound == pytest.approx(first)
                elif found.step_size < found.largest * (1 - 1e-9):
                    assert found.bound >= 2 * first * (1 - 1e-9)  # and one term is as large
            elif found.step_size < found.largest * (1 - 1e-9):
                start = c["distance"] ** 2
                falls = np.exp(K * np.log1p(-found.step_size * c["mu"] / 8)) * start
                assert falls <= start / 2 * (1 + 1e-9)
                log = found.step_size * c["mu"] * K / 8
                assert falls <= (found.bound - falls) / log * (1 + 1e-9) or log <= np.log(2) * 1.01


@pytest.mark.parametrize("accuracy", [1.0, 0.03])
def test_an_accuracy_says_how_many_epochs(accuracy):
    rng = np.random.default_rng(2)
    for _ in range(20):
        c, given = drawn(rng)
        for arguments in cases(c, given):
            found = fs.theory.ppbc(accuracy=accuracy, **arguments)
            assert found.bound <= accuracy**2
            if found.epochs > 1:
                fewer = fs.theory.ppbc(epochs=found.epochs - 1, **arguments)
                assert fewer.bound > accuracy**2


def test_communications_grow_as_the_corollaries_say():
    """3.3: O(M · M/C · αδ2/ε⁴); 3.5: O(M (M/C)² α log 1/ε); E.3: 1/min q as much."""
    common = {"clients": 64, "smoothness": 1.0, "gap": 1.0, "cap": 2.0, "delta_2": 1.0}

    def cost(**more):
        return fs.theory.ppbc(**common | more).communications

    few = cost(participants=8, accuracy=1e-3)
    assert cost(participants=4, accuracy=1e-3) / few == pytest.approx(2, rel=0.01)
    assert cost(participants=8, accuracy=5e-4) / few == pytest.approx(16, rel=0.01)
    assert cost(participants=8, accuracy=1e-3, cap=4.0) / few == pytest.approx(2, rel=0.01)
    up = {"participants": 8, "accuracy": 1e-3}
    often, seldom = cost(availability=0.8, **up), cost(availability=0.2, **up)
    assert seldom / often == pytest.approx(4, rel=0.01)
    # exact gradients of equal clients: linear convergence, (M/C)²
    common |= {"gap": None, "delta_2": 0.0, "strong_convexity": 0.1, "distance": 1.0}
    many = cost(participants=8, accuracy=1e-6)
    assert cost(participants=4, accuracy=1e-6) / many == pytest.approx(4, rel=0.01)
    assert cost(participants=8, accuracy=1e-12) / many == pytest.approx(2, rel=0.01)


BAD = {
    "both": ({"epochs": 3, "accuracy": 0.1, "gap": 1.0}, "Give epochs .* or accuracy"),
    "no start": ({"epochs": 3}, "Give gap"),
    "two starts": ({"epochs": 3, "gap": 1.0, "distance": 1.0}, "Give gap"),
    "no distance": ({"epochs": 3, "strong_convexity": 0.5}, "give distance, and no gap"),
    "too curved": (
        {"epochs": 3, "strong_convexity": 2.0, "distance": 1.0},
        "strong_convexity 2 is above the smoothness 1",
    ),
    "p": ({"epochs": 3, "gap": 1.0, "epoch_end": 0.0}, "a probability above 0, got 0"),
    "alpha": ({"epochs": 3, "gap": 1.0, "cap": 0.5}, "cap must be from 1 to the 5 clients"),
    "q": ({"epochs": 3, "gap": 1.0, "availability": [0.5, 0.0]}, "availability must be a prob"),
    "never": (
        {"accuracy": 1e-15, "gap": 1.0, "noise": 1.0},
        "above 1e-30 even after 1e.40 epochs",
    ),
    "C": ({"epochs": 3, "gap": 1.0, "participants": 6}, "participants is 6, but there are only 5"),
}


@pytest.mark.parametrize(("given", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_constants_raise_one_sentence(given, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.theory.ppbc(clients=5, smoothness=1.0, **given)


# Quadratics f_m = ½(w − c_m)ᵀA(w − c_m): ∇f_m − ∇f = A(c̄ − c_m), so δ1 = 0 and δ2 is known.

CURVES = np.asarray([0.5, 1.0, 2.0])


def quadratic(w, data):
    return 0.5 * jnp.sum(CURVES * (w - data["centre"]) ** 2, axis=-1).mean()


def shifted(clients=6, samples=1, spread=1.0, noise=0.0, seed=0, **options):
    rng = np.random.default_rng(seed)
    centres = spread * rng.standard_normal((clients, 1, 3))
    centres = centres + noise * rng.standard_normal((clients, samples, 3))
    return fs.Problem(quadratic, {"centre": centres}, np.full(3, 2.0), **options)


def known(problem):
    """L, μ, δ2, x* and the gap of `shifted`."""
    centres = problem.samples.values["centre"].mean(axis=1)
    best = centres.mean(axis=0)
    delta_2 = np.mean(np.sum((CURVES * (best - centres)) ** 2, axis=1))
    gap = 0.5 * np.sum(CURVES * (problem.params - best) ** 2)
    return {"smoothness": 2.0, "delta_1": 0.0, "delta_2": delta_2}, best, gap


def test_estimates_are_exact_for_quadratics():
    problem = shifted()
    constants, _, _ = known(problem)
    found = fs.theory.heterogeneity(problem, points=16)
    assert found.smoothness == pytest.approx(2)
    assert found.convexity == pytest.approx(0.5)
    assert found.delta_2(0) == pytest.approx(constants["delta_2"])
    assert found.noise == 0

    noisy = shifted(samples=8, noise=0.3, batch_size=2)
    centres = noisy.samples.values["centre"]
    off = CURVES * (centres - centres.mean(axis=1, keepdims=True))
    each = np.sum(off**2, axis=2).mean(axis=1) / 2  # two of eight
    found = fs.theory.heterogeneity(noisy, points=4, draws=400)
    assert np.sqrt(each.max() * 6 / 7) * 0.9 < found.noise < np.sqrt(each.max()) * 1.15


def test_estimates_with_different_curvatures_hold_where_they_were_made():
    """f_m = ½ s_m w²: the spread is Var(s) ‖w‖² = δ1 ‖∇f‖² with δ1 = Var(s)/mean(s)²."""
    scales = np.asarray([0.5, 1.0, 3.0])
    problem = fs.Problem(
        lambda w, data: 0.5 * data["s"][0] * jnp.sum(w**2), {"s": scales[:, None]}, np.ones(2)
    )
    found = fs.theory.heterogeneity(problem, points=16)
    first, second = found.pairs[-1]
    assert (first, second) == (pytest.approx(np.var(scales) / 2.25), 0)
    assert found.smoothness == pytest.approx(1.5)
    assert found.delta_2(0) > 0


def test_many_parameters_take_another_way_to_the_eigenvalues():
    curves = np.linspace(0.1, 3.0, 250)
    problem = fs.Problem(
        lambda w, data: 0.5 * jnp.sum(curves * (w - data["c"][0]) ** 2),
        {"c": np.zeros((2, 1, 250))},
        np.ones(250),
    )
    found = fs.theory.heterogeneity(problem, points=2)
    assert found.smoothness == pytest.approx(3.0, rel=1e-2)
    assert found.convexity == pytest.approx(0.1, rel=0.1)


def test_corners_are_the_pairs_that_cannot_be_made_smaller():
    rng = np.random.default_rng(3)
    for _ in range(50):
        g, h = rng.exponential(size=(2, 12))
        g[0] = rng.choice([g[0], 0.0])
        pairs = corners(g, h)
        assert pairs[0] == (0.0, h.max())
        for (first, second), (third, fourth) in itertools.pairwise(pairs):
            assert third > first
            assert fourth < second
        for first, second in pairs:
            assert np.all(h <= first * g + second + 1e-12)
            assert second == 0 or np.isclose(np.max(h - first * g), second)
        ends = np.linspace(0, pairs[-1][0], 50)  # convex: between corners lies a line
        least = np.maximum(np.max(h - ends[:, None] * g, axis=1), 0)
        np.testing.assert_allclose(np.interp(ends, *zip(*pairs, strict=True)), least, atol=1e-9)


GNS = {"weighting": "GradientNorm", "select_epoch": parts.Top(2), "cap": 2.0}
RUNS = {
    "3.2": ("PPBC, Theorem 3.2", {}, {}),
    "3.2, minibatches": ("PPBC, Theorem 3.2", {}, {"samples": 4, "noise": 0.3, "batch_size": 1}),
    "E.2": ("PPBC+, Theorem E.2", {"availability": [0.4, 0.9, 1.0, 0.5, 0.7, 0.6]}, {}),
    "3.4": ("PPBC, Theorem 3.4", {"strongly_convex": True}, {}),
    "E.6": ("PPBC+, Theorem E.6", {"strongly_convex": True, "availability": 0.5}, {}),
}


def certified(options, made, epochs, seeds=(0, 1), **more):
    problem = shifted(**made)
    constants, best, gap = known(problem)
    convex = options.get("strongly_convex", False)
    constants |= {"strong_convexity": 0.5} if convex else {"gap": gap}
    if "batch_size" in made:
        centres = problem.samples.values["centre"]
        off = CURVES * (centres - centres.mean(axis=1, keepdims=True))
        constants["noise"] = np.sqrt(np.sum(off**2, axis=2).mean(axis=1).max())
    algorithm = fs.PPBC.from_theory(problem, epochs=epochs, **GNS | options | constants | more)
    promise = algorithm.guarantee
    runs = [
        fs.solve(
            problem, algorithm, promise.rounds, seed=seed, stop=promise.stop, precision="float64"
        )
        for seed in seeds
    ]
    return runs, best, promise


@pytest.mark.parametrize(("theorem", "options", "made"), RUNS.values(), ids=RUNS.keys())
def test_runs_obey_their_theorems(theorem, options, made):
    epochs = 600
    runs, best, promise = certified(options, made, epochs)
    assert promise.theorem == theorem
    assert promise.epoch_end == pytest.approx(2 / 6)
    found = fs.theory.ppbc_certificate(runs)
    assert found.holds, str(found)
    assert "kept" in str(found)
    assert len(found.each) == 2
    run = runs[0]
    assert run.history["epochs"][-1] == epochs
    assert run.history["epoch_end"][-1]
    if promise.strongly_convex:
        gap = np.sum((run.params - best) ** 2)
        np.testing.assert_allclose(found.each[0], gap, rtol=1e-6)
        given = fs.theory.ppbc_certificate(run, minimum=best)
        np.testing.assert_allclose(given.reached, gap, rtol=1e-12)
        assert found.reached < np.sum((run.problem.params - best) ** 2)
    else:
        history = run.history
        starts = history["squared_gradient"][history["epoch_end"]][:-1]
        first = np.sum((CURVES * (run.problem.params - best)) ** 2)
        np.testing.assert_allclose(found.each[0], np.mean([first, *starts]), rtol=1e-12)


def test_a_step_that_is_far_too_large_breaks_the_bound():
    """So that the test above can fail."""
    runs, _, promise = certified({}, {}, 300, seeds=[0])
    wild = dataclasses.replace(runs[0].algorithm, step_size=1.1)
    assert wild.guarantee is None
    asked = dataclasses.replace(promise, step_size=1.1)
    run = fs.solve(runs[0].problem, wild, promise.rounds, stop=promise.stop, precision="float64")
    found = fs.theory.ppbc_certificate(run, asked)
    assert not found.holds
    assert "BROKEN" in str(found)
    with pytest.raises(fs.InvalidInput, match="Nothing was promised"):
        run.certificate()
    with pytest.raises(fs.InvalidInput, match="asks for step_size"):
        fs.theory.certificate(run, promise)


def test_a_certificate_needs_what_the_theorem_is_about():
    runs, _, promise = certified({}, {}, 20, seeds=[0])
    run = runs[0]
    assert run.certificate().guarantee is promise
    with pytest.raises(fs.InvalidInput, match="leave out the optimum"):
        run.certificate(optimum=0.0)

    def certify(problem=run.problem, history=None, **changes):
        algorithm = dataclasses.replace(run.algorithm, **changes)
        other = dataclasses.replace(
            run, algorithm=algorithm, problem=problem, history=history or run.history
        )
        return fs.theory.ppbc_certificate(other, promise)

    assert certify(momentum=0.0).holds
    assert certify(cap=1.0).holds
    short = type(run.history)({name: values[:5] for name, values in run.history.items()})
    blind = type(run.history)({k: v for k, v in run.history.items() if k != "squared_gradient"})
    seldom = type(run.history)({name: values[1::2] for name, values in run.history.items()})
    for changes, sentence in (
        ({"momentum": promise.momentum * 2, "smoothness": 1e9}, "asks for momentum ≤"),
        ({"cap": 3.0}, "asks for cap ≤ 2"),
        ({"epoch_end": 0.5}, "asks for epoch_end"),
        ({"availability": 0.5}, "asks for availability = None"),
        ({"availability": parts.Markov(0.5, 0.5)}, "independently in every round"),
        ({"local_steps": 2}, "one local gradient step"),
        ({"surrogate": "current"}, "correction by the previous epoch"),
        ({"epoch_length": 3}, "epochs that end with probability p"),
        ({"problem": shifted(clients=5)}, "asks for clients = 6, the run has 5"),
        ({"problem": shifted(samples=2, batch_size=1)}, "asks for batch_size = None"),
        ({"history": short}, "about 20 epochs, of which the run has ended"),
        ({"history": blind}, "has not recorded"),
        ({"history": seldom}, "leave evaluate_every at 1|of which the run has ended"),
    ):
        with pytest.raises(fs.InvalidInput, match=sentence):
            certify(**changes)
    other = dataclasses.replace(run, algorithm=fs.FedAvg(0.1))
    with pytest.raises(fs.InvalidInput, match="is not about FedAvg"):
        fs.theory.ppbc_certificate(other, promise)


def test_an_algorithm_from_estimates():
    """Everything estimated: the numbers are those of the known constants, which are exact here."""
    problem = shifted(optimum=0.0)
    constants, _, _ = known(problem)
    with jax.enable_x64(False):
        algorithm = fs.PPBC.from_theory(problem, epochs=100, points=8, **GNS)
    promise = algorithm.guarantee
    start = float(np.mean([quadratic(problem.params, {"centre": c}) for c in centres(problem)]))
    expected = fs.theory.ppbc(
        clients=6, participants=2, cap=2.0, epochs=100, gap=start, **constants
    )
    assert promise.step_size == pytest.approx(expected.step_size)
    assert promise.bound == pytest.approx(expected.bound)
    assert any("smoothness = 2 is an estimate" in each for each in promise.unchecked)
    assert any("δ1 and δ2 are estimates" in each for each in promise.unchecked)
    assert algorithm.momentum == promise.momentum > 0
    assert algorithm.select_epoch == parts.Top(2)
    for options, sentence in (
        ({"lipschitz": 1.0}, "'lipschitz' is not a constant"),
        ({"availability": parts.Markov(0.5, 0.5)}, "independently in every round"),
    ):
        with pytest.raises(fs.InvalidInput, match=sentence):
            fs.PPBC.from_theory(problem, epochs=100, **options)
    with pytest.raises(fs.InvalidInput, match="Give gap"):
        fs.PPBC.from_theory(shifted(), epochs=100, points=2)
    ball = shifted(optimum=0.0, domain=fs.Ball(9.0))
    with pytest.raises(fs.InvalidInput, match=r"theorems are about problems on all of R\^d"):
        fs.PPBC.from_theory(ball, epochs=100)
    saddle = fs.Problem(
        lambda w, data: data["s"][0] * (w[0] ** 2 - w[1] ** 2), {"s": np.ones((2, 1))}, np.ones(2)
    )
    with pytest.raises(fs.InvalidInput, match="not strongly convex"):
        fs.PPBC.from_theory(saddle, epochs=10, points=2, strongly_convex=True)


def centres(problem):
    return problem.samples.values["centre"]
