"""Cox regression on CSV files, against a transcription in NumPy."""

import numpy as np
import pandas as pd
import pytest

import fedsolve as fs
from fedsolve.problems.tables import preprocessing_of

FEATURES = {"age": {"kind": "numeric"}, "smoker": {"kind": "binary", "values": ["no", "yes"]}}
LABEL = {"column": "died", "time": "days", "positive": "yes", "negative": "no"}


def patients(size, number):
    """Risks grow with age and smoking; a third is lost from sight, and some days are equal."""
    rng = np.random.default_rng(number)
    age, smoker = rng.normal(60, 10, size), rng.integers(0, 2, size)
    risk = np.exp(0.05 * (age - 60) + 0.7 * smoker)
    return pd.DataFrame(
        {
            "age": age.round(1),
            "smoker": np.where(smoker, "yes", "no"),
            "days": np.ceil(rng.exponential(100 / risk)),
            "died": np.where(rng.random(size) < 0.67, "yes", "no"),
        }
    )


@pytest.fixture
def folder(tmp_path):
    for number, size in enumerate((60, 25, 40)):
        patients(size, number).to_csv(tmp_path / f"site-{number}.csv", index=False)
    return tmp_path


def loss_and_slope(w, x, time, event):
    """Breslow's partial likelihood, patient by patient, divided by their number; its gradient."""
    loss, slope = 0.0, np.zeros_like(w)
    for i in np.flatnonzero(event):
        there = time >= time[i]
        weights = np.exp(x[there] @ w)
        loss += np.log(weights.sum()) - x[i] @ w
        slope += weights @ x[there] / weights.sum() - x[i]
    return loss / len(x), slope / len(x)


def of_client(problem, number):
    mask = np.asarray(problem.samples.mask)[number]
    return {k: np.asarray(v)[number][mask] for k, v in problem.samples.values.items()}


def test_the_loss_is_breslows_partial_likelihood(folder):
    problem = fs.problems.tabular(FEATURES, LABEL, folder=folder, model="cox")
    each = [of_client(problem, number) for number in range(3)]
    run = fs.solve(problem, fs.FedAvg(0.5), rounds=200, precision="float64")
    assert problem.dimension == 2
    w = np.asarray(run.params.weight)[0]
    found = [loss_and_slope(w, c["x"], c["time"], c["event"]) for c in each]
    assert run.history["objective"][-1] == pytest.approx(np.mean([f for f, _ in found]), rel=1e-12)
    # the mean over sites is least there: its gradient, in NumPy, is 0
    assert np.abs(np.mean([slope for _, slope in found], axis=0)).max() < 1e-6
    assert w[1] > 0.2  # smoking is a risk


def test_held_out_patients_are_ordered_and_new_ones_have_a_risk(folder):
    config = {
        "schema": {"features": FEATURES, "label": LABEL},
        "problem": {"kind": "tabular", "folder": str(folder), "model": "cox", "test": 0.3},
        "algorithm": {"kind": "FedAvg", "step_size": 0.5},
        "run": {"rounds": 60, "precision": "float64"},
    }
    experiment = fs.experiments.resolve("cox", config)
    problem = experiment.cells[""][0]
    done = fs.experiments.run(experiment, out=folder / "run")
    run = done.runs[""][0]
    test = {k: np.asarray(v) for k, v in problem.test.items()}
    score = test["x"] @ np.asarray(run.params.weight)[0]
    right = pairs = 0.0
    for i in np.flatnonzero(test["event"]):
        for k in range(len(score)):
            if test["time"][k] > test["time"][i]:
                pairs += 1
                right += (score[i] > score[k]) + 0.5 * (score[i] == score[k])
    assert run.history["test_concordance"][-1] == pytest.approx(right / pairs, abs=1e-6)
    assert right / pairs > 0.55
    (folder / "new.csv").write_text("age,smoker\n70,yes\n50,no\n")
    found = fs.experiments.predict(done.folder, folder / "new.csv", model="last")
    fit = preprocessing_of(problem).fitted["age"]
    x = np.array([[70, 1.0], [50, 0.0]])
    x[:, 0] = (x[:, 0] - fit["mean"]) / fit["deviation"]
    expected = np.exp(x @ np.asarray(run.params.weight)[0])
    np.testing.assert_allclose(found["risk"], expected, rtol=1e-5)
    assert found["risk"][0] > found["risk"][1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"constraint": {"kind": "sensitivity", "at_least": 0.9}},
            "which the model .cox. does not",
        ),
        ({"constraint": "demographic_parity"}, "which the model .cox. does not make"),
        ({"model": "logistic"}, "is for a label with a `time`"),
        ({"label": {k: v for k, v in LABEL.items() if k != "time"}}, "for a label with a `time`"),
        ({"label": LABEL | {"time": "age"}}, "must not be among the features"),
    ],
)
def test_what_does_not_fit_is_told_in_one_sentence(folder, changes, sentence):
    given = {"features": FEATURES, "label": LABEL, "folder": folder, "model": "cox"} | changes
    with pytest.raises(fs.InvalidInput, match=sentence):
        fs.problems.tabular(**given)


def test_a_time_that_is_negative_is_refused(folder):
    text = (folder / "site-1.csv").read_text().splitlines()
    age, smoker, _, died = text[1].split(",")
    text[1] = ",".join([age, smoker, "-3", died])
    (folder / "site-1.csv").write_text("\n".join(text))
    with pytest.raises(fs.InvalidInput, match=r"row 2, column 'days': '-3' is below the least"):
        fs.problems.tabular(FEATURES, LABEL, folder=folder, model="cox")
