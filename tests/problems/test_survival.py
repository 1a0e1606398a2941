"""Cox regression on Fed-TCGA-BRCA: its loss, concordance and division, against transcriptions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.problems import survival
from tests.support import examples
from tests.support.documents import blocks


def patients(count, seed=0, size=3):
    """Patients with many equal times, and with deaths and losses at the same time."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((count, size)),
        "time": rng.integers(1, 2 + count // 2, count).astype(float),
        "event": rng.integers(0, 2, count),
    }


def flambys_loss(scores, time, event):
    """FLamby's program, line by line: patients sorted by time, the last one first."""
    order = sorted(range(len(time)), key=lambda i: -time[i])
    loss = 0.0
    for place, i in enumerate(order):
        loss += event[i] * np.log(np.sum(np.exp(scores[order[: place + 1]] - scores[i])))
    return loss / len(time)


def breslows_loss(scores, time, event):
    loss = 0.0
    for i in np.flatnonzero(event):
        loss += np.log(np.sum(np.exp(scores[time >= time[i]]))) - scores[i]
    return loss / len(time)


def harrells(scores, time, event):
    """Harrell's C by its definition, over all pairs of patients."""
    right = pairs = 0.0
    for i in range(len(time)):
        for k in range(i):
            a, b = (i, k) if time[i] < time[k] else (k, i)
            if time[i] == time[k]:
                if event[i] == event[k]:
                    continue
                a, b = (i, k) if event[i] else (k, i)
            if not event[a]:
                continue
            pairs += 1
            right += 0.5 if scores[a] == scores[b] else float(scores[a] > scores[b])
    return right / pairs


TRANSCRIBED = {"order": flambys_loss, "breslow": breslows_loss}


@pytest.mark.parametrize("ties", TRANSCRIBED)
def test_the_loss_is_the_partial_likelihood(ties):
    """On clients of different sizes, whose padding must not be at risk, and its gradient."""
    clients = [patients(n, seed=n) for n in (12, 5, 20)]
    w = np.array([0.3, -1.0, 0.5])
    problem = fs.Problem(survival.LOSSES[ties], fs.stack_clients(clients), params=w)
    with jax.enable_x64(True):
        placed = problem.on_device()

        @jax.jit
        def mean(w):
            rows = [jax.tree.map(lambda leaf, j=j: leaf[j], placed.samples) for j in range(3)]
            return sum(placed.value(w, row) for row in rows) / 3

        def expected(w):
            found = [TRANSCRIBED[ties](c["x"] @ w, c["time"], c["event"]) for c in clients]
            return np.mean(found)

        np.testing.assert_allclose(mean(jnp.asarray(w)), expected(w), rtol=1e-12)
        h = 1e-5 * np.eye(3)
        slopes = [(expected(w + e) - expected(w - e)) / 2e-5 for e in h]
        np.testing.assert_allclose(jax.grad(mean)(jnp.asarray(w)), slopes, rtol=1e-7)


def test_ties_differ_between_the_two_rules():
    data = patients(12) | {"mask": np.ones(12, bool)}
    w = jnp.asarray([0.3, -1.0, 0.5])
    assert survival.cox_loss(w, data) > survival.cox_loss_in_order(w, data) + 1e-3
    data["time"] = np.arange(12.0)  # no ties
    np.testing.assert_allclose(
        survival.cox_loss(w, data), survival.cox_loss_in_order(w, data), rtol=1e-6
    )


def test_large_scores_do_not_overflow():
    data = patients(6) | {"mask": np.ones(6, bool)}
    data["x"] = data["x"] * 1e4
    found, slope = jax.value_and_grad(survival.cox_loss)(jnp.ones(3), data)
    assert np.isfinite(found)
    assert np.isfinite(slope).all()


@pytest.mark.parametrize("seed", range(4))
def test_concordance_is_harrells(seed):
    data = patients(15, seed)
    data["x"] = np.round(data["x"])  # so that some risks are equal
    w = np.array([1.0, 1.0, 0.0])
    masked = {name: np.concatenate([rows, rows[:4]]) for name, rows in data.items()}
    masked["mask"] = np.arange(19) < 15
    expected = harrells(data["x"] @ w, data["time"], data["event"])
    np.testing.assert_allclose(survival.concordance(jnp.asarray(w), masked), expected, rtol=1e-6)


def test_who_dies_first_has_the_most_risk():
    data = {"x": np.array([[3.0], [2.0], [1.0]]), "time": np.array([1.0, 2.0, 3.0])}
    data |= {"event": np.array([1, 1, 0]), "mask": np.ones(3, bool)}
    assert survival.concordance(jnp.ones(1), data) == 1
    assert survival.concordance(-jnp.ones(1), data) == 0
    assert survival.concordance(jnp.zeros(1), data) == 0.5


def test_unknown_ties_raise():
    with pytest.raises(fs.InvalidInput, match='ties must be "order" or "breslow"'):
        fs.problems.tcga_brca(ties="efron")


# With the real data


@pytest.fixture
def folder(monkeypatch):
    monkeypatch.setenv("FEDSOLVE_DATA", str(examples.DATA))


needs_patients = examples.needs_data("tcga_brca", "brca.csv")


@needs_patients
def test_the_division_is_flambys(folder):
    data = fs.datasets.load("tcga_brca")
    assert np.bincount(data.train["region"]).tolist() == [248, 156, 164, 129, 129, 40]
    assert np.bincount(data.test["region"]).tolist() == [63, 40, 42, 33, 33, 11]
    assert data.names["region"] == [
        *("Northeast", "South", "West", "Midwest", "Europe", "Canada"),
    ]
    ages = np.concatenate([data.train["x"][:, 0], data.test["x"][:, 0]])
    assert (ages.min(), ages.max()) == (26, 90)
    problem = fs.problems.tcga_brca()
    assert (problem.n, problem.dimension) == (6, 39)
    assert np.asarray(problem.samples.mask).sum(axis=1).tolist() == [248, 156, 164, 129, 129, 40]
    assert np.abs(problem.params).max() <= 39**-0.5


@needs_patients
def test_the_problem_is_the_transcription_on_the_real_data(folder):
    data = fs.datasets.load("tcga_brca")
    problem = fs.problems.tcga_brca(batch_size=None, seed=3)
    run = fs.solve(problem, fs.FedAvg(1e-5, local_steps=2), rounds=2, precision="float64")
    w = np.asarray(run.params, float)

    def parts(arrays, here):
        return arrays["x"][here].astype(float) @ w, arrays["time"][here], arrays["event"][here]

    losses = [flambys_loss(*parts(data.train, data.train["region"] == j)) for j in range(6)]
    np.testing.assert_allclose(run.history["objective"][-1], np.mean(losses), rtol=1e-10)
    everyone = parts(data.test, slice(None))
    np.testing.assert_allclose(run.history["test_loss"][-1], flambys_loss(*everyone), rtol=1e-10)
    expected = harrells(*everyone)
    np.testing.assert_allclose(run.history["test_concordance"][-1], expected, rtol=1e-10)


@needs_patients
def test_the_page_on_survival_works(folder):
    names = {}
    for block in blocks("docs/survival.md"):
        exec(block, names)
    assert 0.5 < names["run"].history["test_concordance"][-1] <= 1


def test_original_files_are_read_where_they_lie(tmp_path, monkeypatch):
    """Three patients of two regions; a patient who is not in the division is left out."""
    own = tmp_path / "tcga_brca"
    own.mkdir()
    head = "pid," + ",".join(f'"f {i}, x"' for i in range(39)) + ",E,T\n"
    ids = ("TCGA-AA-1", "TCGA-BB-2", "TCGA-AA-3", "TCGA-CC-4")
    lines = [f"{name},{','.join(['1'] * 39)},1.0,{10 * i}.0\n" for i, name in enumerate(ids)]
    (own / "brca.csv").write_text(head + "".join(lines))
    (own / "centers.csv").write_text(
        "TSS Code,Source Site,Country,State,Region\nAA,A,,,East\nBB,B,,,West\nCC,C,,,North\n"
    )
    parts = {"TCGA-BB-2": "train_1", "TCGA-AA-3": "test_0", "TCGA-AA-1": "train_0"}
    lines = [f"{name},{part.split('_')[0]},{part}\n" for name, part in parts.items()]
    split = "pid,fold,fold2\n" + "".join(lines)
    (own / "train_test_split.csv").write_text(split)
    monkeypatch.setenv("FEDSOLVE_DATA", str(tmp_path))
    data = fs.datasets.load("tcga_brca")
    assert data.names == {"region": ["East", "West"]}
    assert data.train["time"].tolist() == [0, 10]
    assert data.test["time"].tolist() == [20]
    (own / "train_test_split.csv").write_text(split + "TCGA-DD-9,train,train_1\n")
    with pytest.raises(fs.InvalidInput, match=r"brca\.csv is not the data set tcga_brca: the pati"):
        fs.datasets.load("tcga_brca")
