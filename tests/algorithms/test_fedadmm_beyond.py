"""What FedADMM has beyond its paper, against closed forms, CVXPY and scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from tests.support import examples, oracles

M, K0 = 6, 3


@pytest.fixture(scope="module")
def problem():
    return examples.least_squares(clients=M, constrained=False)


def quadratics(problem):
    """(H_i, b_i) with f_i(w) = ½wᵀH_i w − b_iᵀw + const."""
    data = problem.samples.values
    pairs = zip(data["inputs"], data["targets"], strict=True)
    return [(a.T @ a / len(y), a.T @ y / len(y)) for a, y in pairs]


def values(problem, path):
    data = problem.samples.values
    errors = np.einsum("nsd,rd->rns", data["inputs"], path) - data["targets"]
    return 0.5 * np.mean(errors**2, axis=(1, 2))


def penalties_of(problem):
    return 0.4 * np.asarray([np.linalg.eigvalsh(h)[-1] for h, _ in quadratics(problem)]) / M


def solve(problem, rounds=12, **options):
    options = {"local_iterations": K0, "penalty": penalties_of(problem)} | options
    clock = options.pop("clock", None)
    algorithm = fs.FedADMM(solver=options.pop("solver", "exact"), **options)
    return fs.solve(problem, algorithm, rounds, seed=3, precision="float64", clock=clock)


def test_exact_solutions_follow_the_closed_form(problem):
    run = solve(problem, participants=3)
    path, local, pi, sigma = oracles.fedadmm_exact(
        quadratics(problem), np.zeros(5), run.history["cohort"], K0, penalties_of(problem)
    )
    np.testing.assert_allclose(run.history["objective"], values(problem, path), rtol=1e-9)
    np.testing.assert_allclose(run.params, path[-1], atol=1e-10)
    np.testing.assert_allclose(run.state.clients.dual, pi, atol=1e-10)
    np.testing.assert_allclose(run.state.clients.sent, sigma[:, None] * local + pi, atol=1e-10)


def test_exact_solutions_are_the_limit_of_accurate_steps(problem):
    exact = solve(problem, rounds=4, participants=3)
    steps = solve(
        problem, 4, solver="steps", participants=3, inner_steps=None, accuracy=1e-24, decay=1.0
    )
    np.testing.assert_allclose(steps.params, exact.params, rtol=1e-7)


def test_exact_solutions_refuse_other_objectives():
    def loss(w, data):
        return jnp.mean(jax.nn.softplus(data["x"] @ w))

    other = fs.Problem(loss, {"x": np.random.default_rng(0).standard_normal((2, 4, 3))}, np.ones(3))
    with pytest.raises(fs.InvalidInput, match="another Hessian at another point"):
        fs.solve(other, fs.FedADMM(solver="exact"), rounds=1)


@pytest.mark.parametrize("bound", [pytest.param(None, marks=pytest.mark.slow), 0.4])
def test_the_lasso_is_that_of_cvxpy_and_scikit_learn(problem, bound):
    import cvxpy as cp
    from sklearn.linear_model import Lasso

    strength, data = 0.6, problem.samples.values
    x, y = np.concatenate(data["inputs"]), np.concatenate(data["targets"])
    box = fs.WholeSpace() if bound is None else fs.Box(-bound, bound)
    boxed = fs.Problem(examples.quadratic, data, np.zeros(5), domain=box)
    for solver in ("exact", "steps"):
        run = solve(
            boxed, 600, solver=solver, participants=4, penalty=1.0, regularizer=fs.L1(strength)
        )
        w = cp.Variable(5)
        within = [] if bound is None else [cp.abs(w) <= bound]
        risk = cp.sum_squares(x @ w - y) / (2 * len(y)) + strength * cp.norm1(w)
        best = cp.Problem(cp.Minimize(risk), within).solve(solver="CLARABEL")
        np.testing.assert_allclose(run.params, w.value, atol=1e-6)
        found = run.history["objective"][-1] + run.history["regularizer"][-1]
        np.testing.assert_allclose(found, best, rtol=1e-7)
        assert (np.abs(run.params) < 1e-9).any()  # exact zeros are the point of the lasso
        if bound is None:
            lasso = Lasso(strength, fit_intercept=False, tol=1e-12).fit(x, y)
            np.testing.assert_allclose(run.params, lasso.coef_, atol=1e-6)


def test_a_regularizer_refuses_a_ball(problem):
    ball = fs.Problem(examples.quadratic, problem.samples, np.zeros(5), domain=fs.Ball(1.0))
    with pytest.raises(fs.InvalidInput, match="needs a box or the whole space"):
        fs.solve(ball, fs.FedADMM(regularizer=fs.L1(0.1)), rounds=1)
    with pytest.raises(fs.InvalidInput, match="strength"):
        fs.L1(-1.0)


def test_residuals_are_those_of_the_states(problem):
    """Primal, dual and (22) without its last term, from the clients' states in NumPy."""
    extra, state, before = fs.L1(0.1), None, np.zeros(5)
    algorithm = fs.FedADMM(
        3, participants=3, penalty=1.0, residuals=True, regularizer=extra, solver="exact"
    )
    for rounds in (1, 2, 3):
        run = fs.solve(problem, algorithm, rounds, seed=1, precision="float64", resume=state)
        state, clients = run.state, jax.tree.map(np.asarray, run.state.clients)
        w, sigma = np.asarray(run.params), clients.penalty
        local = (clients.sent - clients.dual) / sigma[:, None]
        gap = local - w
        told = {name: column[-1] for name, column in run.history.items() if column.ndim == 1}
        np.testing.assert_allclose(told["primal_residual"], np.linalg.norm(gap), rtol=1e-9)
        dual = np.linalg.norm(sigma) * np.linalg.norm(w - before)
        np.testing.assert_allclose(told["dual_residual"], dual, rtol=1e-9)
        own = np.asarray([values(problem, local[i : i + 1]) for i in range(M)])  # f at w_i
        data = problem.samples.values
        own = [
            0.5 * np.mean((data["inputs"][i] @ local[i] - data["targets"][i]) ** 2)
            for i in range(M)
        ]
        total = np.mean(own) + np.sum(clients.dual * gap) + sigma / 2 @ np.sum(gap**2, axis=1)
        total += 0.1 * np.abs(w).sum()
        np.testing.assert_allclose(told["augmented_lagrangian"], total, rtol=1e-9)
        before = w
    run = fs.solve(problem, algorithm, 400, seed=1, precision="float64")
    assert max(run.history["primal_residual"][-1], run.history["dual_residual"][-1]) < 1e-8


@pytest.mark.slow
def test_residuals_leave_the_run_as_it_is(problem):
    plain, told = (solve(problem, participants=3, residuals=on) for on in (False, True))
    np.testing.assert_array_equal(plain.params, told.params)
    assert told.history["bytes_up"][-1] - plain.history["bytes_up"][-1] == 5 * 8 * M


@pytest.mark.parametrize(("start", "way"), [(1000.0, -1), (1e-4, 1)])
def test_balanced_penalties_follow_the_residuals(problem, start, way):
    """The run by its own scales is the transcription; the scale goes the right way, and it pays."""
    penalties = start * penalties_of(problem)
    rule = fs.ResidualBalancing(ratio=3.0, factor=2.0, until=40)
    options = {"participants": 4, "penalty": penalties, "rounds": 80, "local_iterations": 1}
    run, fixed = solve(problem, **options, balance=rule), solve(problem, **options)
    scales = run.history["penalty_scale"]
    path, _, _, sigma = oracles.fedadmm_exact(
        quadratics(problem), np.zeros(5), run.history["cohort"], 1, penalties, scales=scales
    )
    np.testing.assert_allclose(run.history["objective"], values(problem, path), rtol=1e-8)
    np.testing.assert_allclose(run.state.clients.penalty, sigma, rtol=1e-10)
    np.testing.assert_allclose(run.state.server.penalties, sigma.sum(), rtol=1e-10)
    steps = np.diff(np.log2(scales))
    assert set(np.round(steps, 9)) <= {-1.0, 0.0, 1.0}
    assert way * np.log2(scales[-1]) > 3
    assert (steps[40:] == 0).all()
    best = values(problem, np.linalg.lstsq(*pooled(problem), rcond=None)[0][None])[0]
    assert run.history["objective"][-1] - best < 0.1 * (fixed.history["objective"][-1] - best)


def pooled(problem):
    data = problem.samples.values
    return np.concatenate(data["inputs"]), np.concatenate(data["targets"])


def test_scales_are_the_rule_on_relative_residuals(problem):
    rule = fs.ResidualBalancing(ratio=2.0, factor=3.0)
    one = jnp.asarray(1.0)
    assert float(rule.next(one, 2.1 * one, one, 0)) == 3.0
    assert float(rule.next(one, one, 2.1 * one, 99)) == pytest.approx(1 / 3)
    assert float(rule.next(one, one, 1.9 * one, 0)) == 1.0
    assert float(rule.next(one, 9 * one, one, 100)) == 1.0
    # multiplying f by 1000 changes neither the relative residuals nor the scales
    data = problem.samples.values
    scaled = {"inputs": data["inputs"] * 1000**0.5, "targets": data["targets"] * 1000**0.5}
    both = [
        solve(
            fs.Problem(examples.quadratic, clients, np.zeros(5)),
            penalty=100 * factor * penalties_of(problem),
            balance=rule,
        ).history["penalty_scale"]
        for factor, clients in ((1, data), (1000, scaled))
    ]
    np.testing.assert_allclose(both[0], both[1], rtol=1e-12)
    assert both[0][-1] < 0.1


def test_late_answers_count_in_the_next_round(problem):
    first = fs.participation.FirstAnswers(2, median=2.0)
    run = solve(problem, participants=4, availability=first, late="next", clock=fs.Clock())
    assert (run.history["on_time"].sum(axis=1) == 2).all()
    assert run.history["available"].all()
    path, local, pi, sigma = oracles.fedadmm_exact(
        quadratics(problem),
        np.zeros(5),
        run.history["cohort"],
        K0,
        penalties_of(problem),
        on_time=run.history["on_time"],
    )
    np.testing.assert_allclose(run.history["objective"], values(problem, path), rtol=1e-9)
    np.testing.assert_allclose(run.state.clients.sent, sigma[:, None] * local + pi, atol=1e-10)
    # nothing is lost: what the server does not have yet, it has kept for the next round
    server = run.state.server
    held = np.asarray(server.total) + np.asarray(server.late[0])
    everyone = np.asarray(run.state.clients.sent).sum(axis=0)
    np.testing.assert_allclose(held, everyone, atol=1e-10)
    # the clock waits for two answers only, and all four are paid for
    waited = solve(
        problem,
        participants=4,
        availability=fs.participation.FirstAnswers(4, median=2.0),
        clock=fs.Clock(),
    )
    assert np.all(run.history["seconds"] < waited.history["seconds"])
    np.testing.assert_array_equal(run.history["bytes_up"], waited.history["bytes_up"])
    optimum = np.linalg.lstsq(*pooled(problem), rcond=None)[0]
    end = solve(problem, 600, participants=4, penalty=1.0, availability=first, late="next")
    np.testing.assert_allclose(end.params, optimum, atol=1e-7)


@pytest.mark.slow
def test_with_nobody_late_it_is_the_usual_run(problem):
    everyone = fs.participation.FirstAnswers(3)
    late = solve(problem, participants=3, availability=everyone, late="next")
    np.testing.assert_allclose(late.params, solve(problem, participants=3).params, atol=1e-12)


@pytest.mark.slow
def test_late_answers_in_other_runtimes(problem):
    options = {"participants": 4, "penalty": 1.0, "late": "next", "residuals": True}
    options |= {"balance": fs.ResidualBalancing(), "regularizer": fs.L1(0.1)}
    algorithm = fs.FedADMM(3, availability=fs.participation.FirstAnswers(2), **options)
    compiled, *others = (
        fs.solve(problem, algorithm, 5, seed=0, precision="float64", runtime=runtime)
        for runtime in ("compiled", "debug", "streamed")
    )
    for other in others:
        for name, column in compiled.history.items():
            np.testing.assert_allclose(column, other.history[name], atol=1e-9, err_msg=name)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"solver": "newton"}, 'solver must be "steps" or "exact"'),
        ({"late": "now"}, 'late must be "lost" or "next"'),
        ({"late": "next"}, "needs availability=FirstAnswers"),
        ({"regularizer": 0.1}, "regularizer must be a Regularizer"),
        ({"balance": 2.0}, "balance must be a ResidualBalancing"),
    ],
)
def test_bad_settings_raise(options, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.FedADMM(**options)


@pytest.mark.parametrize("options", [{"ratio": 1.0}, {"factor": 0.5}, {"until": 0}])
def test_balancing_refuses(options):
    with pytest.raises(fs.InvalidInput):
        fs.ResidualBalancing(**options)


def test_its_parts_can_be_named_in_experiments():
    table = {
        "problem": {"kind": "linear_regression", "clients": 4, "size": 3},
        "algorithm": {
            "kind": "FedADMM",
            "balance": {"kind": "ResidualBalancing", "ratio": 5.0},
            "regularizer": {"kind": "L1", "strength": 0.1},
            "selection": {"kind": "Covering", "count": 2, "within": 3},
        },
        "run": {"rounds": 2},
    }
    algorithm = fs.experiments.resolve("x", table).cells.algorithms[""]
    assert algorithm.regularizer == fs.L1(0.1)
    assert algorithm.balance == fs.ResidualBalancing(5.0)
    assert algorithm.selection == fs.participation.Covering(2, 3)
