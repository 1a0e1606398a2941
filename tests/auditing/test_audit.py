"""Audits of runs and of run folders: a model that overfits its constraint is caught."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.auditing import Audit, Tally, count
from fedsolve.experiments.audit import Audited, read_audits
from tests.support.commands import fedsolve  # noqa: F401 (a fixture)


def noise(seed, clients=3, samples=40, size=60):
    """Labels that inputs say nothing about, so that whatever is learnt is overfitted."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((clients, samples, size)) / np.sqrt(size),
        "y": rng.choice([-1.0, 1.0], (clients, samples)),
    }


def wrong(w, data):
    """The share of wrong signs less 0.2, by a smooth loss in (0, 1)."""
    return jnp.mean(1 / (1 + jnp.exp(4 * data["y"] * (data["x"] @ w)))) - 0.2


def overfitted():
    problem = fs.Problem(
        lambda w, data: 0.001 * jnp.sum(w**2), noise(0), np.zeros(60), constraint=wrong
    )
    return fs.solve(problem, fs.FedSGM(5.0, tolerance=0.05), rounds=200, evaluate_every=200)


def test_a_model_that_overfits_its_constraint_is_caught():
    run = overfitted()
    assert run.history["constraint"][-1] <= 0.05
    found = run.audit(noise(1, samples=400), ranges=(-0.2, 0.8))
    assert found["g"].verdict == "not met"
    assert found["g"].value > 0.2
    assert found["g"].bound == pytest.approx(0.05)
    assert not found.met
    assert [v.site for v in found.verdicts] == ["all", "client 0", "client 1", "client 2"]
    few = run.audit(noise(1, samples=10), ranges=(-0.2, 0.8), sites=False)
    assert few["g"].verdict == "cannot be told"
    assert few["g"].needed > 30
    assert "samples would do" in str(few)


def test_values_are_those_of_the_constraint_itself():
    """g over held-out clients, as a run over them would evaluate it; clients of any size."""
    run, rng = overfitted(), np.random.default_rng(3)
    sizes = [
        {"x": rng.standard_normal((n, 60)), "y": rng.choice([-1.0, 1.0], n)} for n in (3, 11, 7)
    ]
    found = run.audit(sizes, ranges=(-0.2, 0.8))
    own = [float(wrong(run.params, each)) for each in sizes]
    np.testing.assert_allclose(found["g"].value, np.mean(own), rtol=1e-5)
    np.testing.assert_allclose([v.value for v in found.verdicts[1:]], own, rtol=1e-5)
    assert [v.samples for v in found.verdicts] == [21, 3, 11, 7]
    other = run.audit(sizes, ranges=(-0.2, 0.8), params=np.zeros(60), tolerance=1.0)
    np.testing.assert_allclose(other["g"].value, 0.3, rtol=1e-5)
    assert other["g"].bound == 1.0


def test_a_constraint_on_one_of_two_sets_of_samples():
    """Neyman-Pearson: g is a mean over the minority class, and only these samples count."""
    problem = fs.problems.neyman_pearson(clients=4)
    run = fs.solve(problem, fs.FedSGM(0.3, tolerance=0.05), 20)
    tally = count(problem, run.params, problem.samples)
    minority = problem.samples.values["minority"].shape[1]
    assert all(sums["0/all"].count <= minority for sums in tally.sums)
    found = run.audit(problem.samples, ranges=(0.0, 100.0))
    np.testing.assert_allclose(found["g"].value, run.history["constraint"][-1], rtol=1e-4)


def test_what_is_no_mean_has_no_bound():
    def largest(w, data):
        return jnp.max(data["y"] * (data["x"] @ w))

    problem = fs.Problem(lambda w, d: jnp.sum(w**2), noise(0), np.ones(60), constraint=largest)
    run = fs.solve(problem, fs.FedSGM(0.1), rounds=1)
    found = run.audit(noise(1), ranges=(-9.0, 9.0))
    assert (found["g"].verdict, found.met) == ("no bound", False)
    assert "no mean over samples" in found["g"].why
    unknown = overfitted().audit(noise(1))["g"]
    assert unknown.verdict == "no bound"
    assert "ranges=(low, high)" in unknown.why
    assert unknown.value > 0.2


def test_several_constraints_are_judged_each():
    def low(w, data):
        return jnp.mean(data["x"] @ w) - 0.5

    problem = fs.Problem(
        lambda w, d: jnp.sum(w**2), noise(0), np.zeros(60), constraint=fs.Maximum(wrong, low)
    )
    run = fs.solve(problem, fs.FedSGM(0.1, tolerance=0.4), rounds=1)
    found = run.audit(noise(1, samples=300), ranges={"g": (-0.2, 0.8), "g2": (-6, 6)}, sites=False)
    assert [v.name for v in found.verdicts] == ["g", "g2"]
    assert found["g"].verdict == "met"
    assert found["g2"].value == pytest.approx(-0.5, abs=0.1)


def test_constraints_by_name_are_judged_by_their_exact_rates():
    """Each claim of fs.constraints, over all and at each client; one plain g beside it."""

    def data(seed, samples):
        rng = np.random.default_rng(seed)
        two = (2, samples)
        return {k: rng.integers(0, 2, two) for k in ("y", "sex")} | {"x": rng.normal(size=two)}

    def score(w, data):
        return data["x"] * w[0]

    named = fs.constraints
    both = fs.Several(
        {
            "found": named.sensitivity(score, at_least=0.4),
            "gap": named.demographic_parity(score, at_most=0.3, group="sex", groups=["m", "f"]),
            "each": fs.EachClient(named.specificity(score, at_least=0.9)),
            "plain": lambda w, data: jnp.mean(data["x"]) + 0 * w[0],
        },
        tolerances=[0.0, 0.0, 0.0, 0.2],
    )
    problem = fs.Problem(lambda w, d: w @ w, data(0, 40), np.ones(1), constraint=both)
    run = fs.solve(problem, fs.FedSGM(0.01, tolerance=0.1), rounds=1)
    new = data(1, 900)
    found = run.audit(new, ranges=(-6.0, 6.0))
    up = new["x"] * run.params[0] > 0
    np.testing.assert_allclose(found["found"].value, up[new["y"] == 1].mean())
    assert found["found"].samples == (new["y"] == 1).sum()
    shares = [up[new["sex"] == code].mean() for code in (0, 1)]
    np.testing.assert_allclose(found["gap"].value, abs(shares[0] - shares[1]), atol=1e-9)
    np.testing.assert_allclose(
        found["each", "client 1"].value, 1 - up[1][new["y"][1] == 0].mean(), rtol=1e-6
    )
    assert found["each", "client 1"].verdict == "not met"
    assert [found[name].verdict for name in ("found", "gap")] == ["met", "met"]
    assert found["plain"].bound == pytest.approx(0.3)
    assert len(found.verdicts) == 3 * 3 + 2
    with pytest.raises(KeyError):
        found["each"]


def test_claims_of_one_constraint_have_its_tolerance():
    bound = fs.constraints.group_loss(
        lambda w, data: (data["x"] @ w) ** 2, 9.0, group="y", groups={"a": -1, "b": 1}
    )
    constraint = fs.Several({"groups": bound}, tolerances={"groups": 0.25})
    problem = fs.Problem(lambda w, data: w @ w, noise(0), np.ones(60), constraint)
    tally = count(problem, problem.params, noise(1), ranges=(0.0, 99.0))
    assert [claim.own_tolerance for claim in tally.claims] == [0.25, 0.25]


def test_audits_and_counts_survive_json(tmp_path):
    run = overfitted()
    tally = count(run.problem, run.params, noise(1), ["a", "b", "c"])
    assert Tally.from_json(json.loads(json.dumps(tally.to_json()))) == tally
    found = run.audit(noise(1), ranges=(-0.2, 0.8), names=["a", "b", "c"])
    found.save(tmp_path / "audit.json")
    assert Audit.from_json(json.loads((tmp_path / "audit.json").read_text())) == found
    unknown = run.audit(noise(1))
    again = Audit.from_json(json.loads(json.dumps(unknown.to_json())))
    assert str(again) == str(unknown)
    assert list(found.table["site"]) == ["all", "a", "b", "c"]
    other = count(run.problem, run.params + 1, noise(1), ["d", "e", "f"])
    with pytest.raises(fs.InvalidInput, match="different models"):
        tally.plus(other)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"test_clients": None}, "needs held-out data"),
        ({"test_clients": {"x": np.zeros((0, 4, 60)), "y": np.zeros((0, 4))}}, "are empty"),
        ({"confidence": 1.0}, "confidence must be between 0 and 1"),
        ({"ranges": (1.0, 0.0)}, "low < high"),
        ({"ranges": (0.0, 0.1)}, "outside its range from 0 to 0.1"),
        ({"names": ["a", "a", "b"]}, "3 different names"),
    ],
)
def test_bad_arguments_raise(arguments, sentence):
    given = {"test_clients": noise(1)} | arguments
    with pytest.raises(fs.InvalidInput, match=sentence):
        overfitted().audit(**given)


def test_a_problem_without_a_constraint_raises():
    problem = fs.problems.linear_regression(clients=2, size=2, smallest=3, largest=3)
    run = fs.solve(problem, fs.FedAvg(0.1), 1)
    with pytest.raises(fs.InvalidInput, match="nothing to audit"):
        run.audit(problem.samples)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a run, and held-out data of three sites."""
    place = tmp_path_factory.mktemp("audit")
    settings = {"problem.clients": 3, "algorithm.participants": 2}
    fs.experiments.run("neyman-pearson", rounds=30, settings=settings, out=place / "run")
    problem = fs.problems.neyman_pearson(clients=3)
    values = {k: np.asarray(v) for k, v in problem.samples.values.items()}
    np.savez(place / "all.npz", **values)
    for site in range(3):
        np.savez(place / f"{site}.npz", **{k: v[site : site + 1] for k, v in values.items()})
    return place


def test_sites_counts_give_the_same_audit_as_all_data(folder, fedsolve):  # noqa: F811
    """Each site counts its own data; only these files travel."""
    run = str(folder / "run")
    given = ["--range", "0,100"]
    status, whole, _ = fedsolve("audit", run, "--data", folder / "all.npz", *given)
    assert status == 0
    files = []
    for site in range(3):
        files += ["--merge", str(folder / f"{site}.json")]
        own = ["--data", str(folder / f"{site}.npz"), "--site", f"client {site}", *given]
        assert fedsolve("audit", run, *own, "--counts", folder / f"{site}.json")[0] == 0
        text = (folder / f"{site}.json").read_text()
        assert len(re.findall(r"\d+\.\d", text)) < 10  # a count and two sums, whatever the data
    assert fedsolve("audit", run, *files, *given)[1] == whole
    assert "cannot be told" in whole
    found = read_audits(folder / "run")
    assert list(found) == ["seed-0"]
    audited = Audited(folder / "run")
    problem = fs.problems.neyman_pearson(clients=3)
    judged = audited.judge(audited.count(problem.samples, ranges=(0, 100)), ranges=(0, 100))
    assert judged == found["seed-0"]


def test_the_model_card_has_the_last_audit(folder):
    card = folder / "run" / "model_card.md"
    whole = card.read_text(encoding="utf-8").partition("\n## Audit")[0]
    audited = Audited(folder / "run")
    tally = audited.count(dict(np.load(folder / "all.npz")), ranges=(0, 100))
    for confidence in (0.9, 0.95):
        found = audited.judge(tally, confidence, (0, 100))
        expected = f"{whole}\n## Audit on held-out data\n\nseed-0:\n\n```\n{found}\n```\n"
        assert card.read_text(encoding="utf-8") == expected


def test_the_report_has_the_audit(folder, fedsolve):  # noqa: F811
    audited = Audited(folder / "run")
    tally = audited.count(dict(np.load(folder / "all.npz")), ranges=(0, 100))
    audited.judge(tally, ranges=(0, 100))
    assert fedsolve("report", folder / "run", "-o", folder / "report.html")[0] == 0
    assert "held-out data" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "An audit needs held-out data: give --data, or --merge"),
        (["--data", "none.npz"], "Cannot load none.npz"),
        (["--data", "all.npz", "--confidence", "1"], "confidence must be between 0 and 1"),
        (["--data", "all.npz", "--range", "3"], "--range takes two numbers"),
        (["--data", "all.npz", "--run", "seed-7"], "There is no run 'seed-7'"),
        (["--data", "all.npz", "--model", "first"], "model must be one of last, average, best"),
        (["--merge", "none.json"], "none.json cannot be read"),
    ],
)
def test_a_wrong_command_gets_a_sentence(folder, fedsolve, words, sentence):  # noqa: F811
    words = [str(folder / word) if word == "all.npz" else word for word in words]
    status, _, said = fedsolve("audit", folder / "run", *words)
    assert status == 2
    assert sentence in " ".join(said.split())
