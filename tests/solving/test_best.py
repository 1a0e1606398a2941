"""`run.best`: the best evaluated round by a stated rule, in every runtime."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import fedsolve as fs
from fedsolve.federation.best import Best
from tests.support.examples import contribution_game, least_squares
from tests.support.in_process import Wires, deploy

ALGORITHM = fs.FedSGM(0.1, 0.1, participants=3, local_steps=2)


def expected(history, tolerance):
    """The rule in NumPy: the place in the history, and whether it is feasible."""
    f, g = history["objective"], history["constraint"]
    good = np.flatnonzero(g <= np.float32(tolerance))
    if len(good):
        return good[np.argmin(f[good])], True
    return int(np.argmin(g)), False


def check(run, tolerance):
    place, feasible = expected(run.history, tolerance)
    best = run.best
    assert best.feasible is feasible
    assert best.round == run.history["round"][place]
    assert best.objective == run.history["objective"][place]
    assert best.constraint == run.history["constraint"][place]


@pytest.mark.parametrize("tolerance", [0.0, 0.1, 5.0])
def test_best_is_the_least_objective_of_feasible_rounds(tolerance):
    """Also where nothing is feasible (then the least g), and where everything is."""
    problem = fs.problems.neyman_pearson(clients=4, level=None)
    run = fs.solve(problem, fs.FedSGM(1.0, tolerance), rounds=40)
    check(run, tolerance)
    assert run.best.feasible is (tolerance > 0)
    again = fs.solve(problem, fs.FedSGM(1.0, tolerance), rounds=run.best.round)
    np.testing.assert_array_equal(run.best.params, again.params)


def test_best_without_a_constraint_is_the_least_objective():
    problem = least_squares(constrained=False)
    run = fs.solve(problem, fs.FedAvg(0.3, participants=2), rounds=20)
    assert run.best.feasible is True
    assert run.best.constraint is None
    assert run.best.round == run.history["round"][np.argmin(run.history["objective"])]


def test_no_evaluated_round_has_no_best():
    problem = least_squares()
    with pytest.raises(fs.Interrupted) as stopped:
        fs.solve(problem, ALGORITHM, 5, interrupted=lambda: True)
    assert stopped.value.run.best is None


def test_all_runtimes_agree():
    problem = least_squares()
    whole = fs.solve(problem, ALGORITHM, rounds=7, evaluate_every=2)
    check(whole, 0.1)
    for runtime in ("debug", "streamed"):
        run = fs.solve(problem, ALGORITHM, rounds=7, evaluate_every=2, runtime=runtime)
        assert run.best.round == whole.best.round
        np.testing.assert_allclose(run.best.params, whole.best.params, rtol=1e-5)
    swept = fs.sweep(problem, ALGORITHM, 7, seeds=[0, 1], evaluate_every=2, tolerance=[0.1, 2.0])
    for run in swept.runs:
        check(run, run.settings["tolerance"])
    np.testing.assert_allclose(swept[0].best.params, whole.best.params, rtol=1e-5)


def test_resumed_runs_have_the_same_best(tmp_path):
    """A last evaluation between the others does not count where the run goes on."""
    problem = least_squares()

    def run(rounds, **options):
        return fs.solve(problem, ALGORITHM, rounds, evaluate_every=5, **options)

    place = tmp_path / "run"
    first = run(7, checkpoint=place)
    check(first, 0.1)
    resumed = run(20, checkpoint=place, resume=place)
    whole = run(20)
    check(resumed, 0.1)
    assert (resumed.best.round, resumed.best.objective) == (whole.best.round, whole.best.objective)
    np.testing.assert_array_equal(resumed.best.params, whole.best.params)
    later = fs.solve(problem, ALGORITHM, 25, resume=whole.state)
    assert later.best.round > 20  # of the rounds in its history


def test_a_last_round_between_evaluations_is_not_remembered(tmp_path):
    """Each round is worse than the one before, so the first evaluated one is the best."""
    problem = fs.Problem(
        lambda w, data: 0.5 * jnp.mean((data["y"] - w) ** 2),
        {"y": np.asarray([[1.0, 3.0], [4.0, 6.0]])},
        np.zeros(1),
    )
    algorithm, place = fs.FedAvg(2.1), tmp_path / "run"
    first = fs.solve(problem, algorithm, 3, evaluate_every=5, checkpoint=place)
    assert first.best.round == 3
    resumed = fs.solve(problem, algorithm, 12, evaluate_every=5, checkpoint=place, resume=place)
    assert resumed.best.round == 5


def test_weighted_problems_take_the_weighted_objective():
    problem = least_squares()
    run = fs.solve(problem, fs.FedSGM(0.05, 0.5, weighting="DataSize"), rounds=10)
    assert run.best.objective in run.history["objective"]
    weighted = fs.FedSGM(0.05, 0.5, weighting=fs.Strategic(contribution_game(), 2.0))
    run = fs.solve(problem, weighted, rounds=10)
    assert "weighted_objective" in run.history
    assert run.best.objective in run.history["weighted_objective"]


def test_the_average_state_of_the_loss_belongs_to_the_best_round():
    def loss(w, data, state):
        value = 0.5 * jnp.mean((data["y"] - w - 0 * state) ** 2)
        return value, state + 1

    data = {"y": np.asarray([[1.0, 3.0], [4.0, 6.0]])}
    problem = fs.Problem(loss, data, np.zeros(1), state=np.zeros(()))
    run = fs.solve(problem, fs.FedAvg(2.5), rounds=6)  # diverges: the first round is the best
    assert run.best.round == 1
    assert run.best.buffers == 1
    assert run.buffers == 6


def test_order_of_rounds():
    """Feasible before complete before least: by a table of pairs."""

    def best(*entries):
        found = Best.none(jnp.zeros(1), None)
        for number, (f, g, complete) in enumerate(entries, start=1):
            entry = {"objective": f, "constraint": g}
            found = found.improved(jnp.full(1, float(number)), None, number, entry, 0.0, complete)
        return int(found.round), bool(found.feasible)

    assert best((1.0, -1.0, True), (0.5, -0.1, True), (0.1, 0.1, True)) == (2, True)
    assert best((1.0, -1.0, False), (2.0, 0.5, True)) == (2, False)  # some clients: unknown
    assert best((1.0, -1.0, False), (2.0, -2.0, False)) == (2, False)
    assert best((1.0, 0.5, True), (9.0, -0.5, True), (0.0, -9.0, False)) == (2, True)
    assert best((1.0, 0.5, True), (2.0, 0.4, True), (0.1, 0.6, True)) == (2, False)
    assert best((np.nan, -1.0, True), (3.0, 1.0, True), (np.inf, -1.0, True)) == (2, False)
    assert best((1.0, -1.0, True), (1.0, -1.0, True)) == (1, True)  # the first of equal ones


@pytest.mark.xdist_group("in-process")
def test_a_deployment_has_the_simulation_s_best_and_none_feasible_without_a_site(tmp_path):
    problem = least_squares()
    wires = Wires(problem, ALGORITHM, tmp_path / "all")
    run, _ = deploy(problem, ALGORITHM, wires, tmp_path / "all/server", 6)
    simulated = fs.solve(problem, ALGORITHM, 6, precision="float64")
    assert run.best.round == simulated.best.round
    assert run.best.feasible
    np.testing.assert_allclose(run.best.params, simulated.best.params, rtol=1e-12)

    wires = Wires(problem, ALGORITHM, tmp_path / "some")
    wires.lose = lambda site, number: "reply lost" if site == "site-4" and number > 8 else ""
    run, _ = deploy(problem, ALGORITHM, wires, tmp_path / "some/server", 6)
    heard = run.history["clients_evaluated"] == problem.n
    feasible = heard & (run.history["constraint"] <= 0.1)
    assert not heard.all()
    assert run.best.feasible is bool(feasible.any())
    if feasible.any():
        f = np.where(feasible, run.history["objective"], np.inf)
        assert run.best.round == run.history["round"][np.argmin(f)]


def test_an_experiment_saves_its_best_model(tmp_path):
    result = fs.experiments.run("neyman-pearson", rounds=60, out=tmp_path / "run")
    (run,) = result.runs[""]
    saved = load_file(result.folder / "best.safetensors")
    np.testing.assert_array_equal(saved["seed-0/params"], run.best.params)
    facts = json.loads((result.folder / "run.json").read_text())["best"]["seed-0"]
    assert facts["round"] == run.best.round
    assert facts["feasible"] is run.best.feasible
    assert f"round {run.best.round}," in (result.folder / "model_card.md").read_text()
