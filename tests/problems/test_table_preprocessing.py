"""What is found of all sites' rows before the first round: quartiles, categories, groups."""

import itertools
import tomllib

import numpy as np
import pandas as pd
import pytest
import tomli_w
from sklearn.preprocessing import RobustScaler

import fedsolve as fs
from fedsolve.data.collected import MOST_WORDS, _alone, _row, cells_of, words_in_cells, words_of
from fedsolve.data.histograms import histogram_of, quantiles_of
from fedsolve.data.table_files import Source
from fedsolve.experiments.config import resolve
from fedsolve.flare.limits import Limits
from fedsolve.flare.preprocessing import Tables, fitted_by
from fedsolve.flare.site_config import site_problem
from fedsolve.problems.tables import owners_files, preprocessing_of
from tests.support.in_process import SITES, Wires, deploy

FEATURES = {
    "age": {"kind": "numeric", "least": 0, "most": 130, "missing": "median", "bins": 1300},
    "stay": {"kind": "numeric", "least": 0, "most": 60, "scaling": "quartiles", "bins": 6000},
    "ward": {"kind": "categorical", "categories": "collect", "missing": "category"},
}
LABEL = {"column": "died", "positive": "yes", "negative": "no"}
GROUPS = [
    {"column": "sex", "protected": "F", "unprotected": "M"},
    {"column": "region", "categories": ["coast", "hills", "plain"]},
]
SIZES = (40, 25, 30, 35)  # at four sites; site 1 has a second file
COLUMNS = ["age", "stay", "ward", "sex", "region", "died"]


def rows_of(size, number):
    rng = np.random.default_rng(number)
    found = pd.DataFrame(
        {
            "age": rng.normal(60 + number, 15, size).round(1),
            "stay": rng.exponential(8, size).clip(0, 60).round(2),
            "ward": rng.choice(["A", "B", f"own {number}", ""], size, p=[0.4, 0.3, 0.2, 0.1]),
            "sex": rng.choice(["F", "M"], size),
            "region": rng.choice(["coast", "hills", "plain"], size),
            "died": rng.choice(["no", "yes"], size),
        }
    )
    found.loc[rng.random(size) < 0.2, "age"] = np.nan
    found.loc[0, "ward"] = "rare"
    return found[COLUMNS]


@pytest.fixture
def study(tmp_path):
    """Four sites with files of their own, and an experiment with a table [schema]."""
    for number, size in enumerate(SIZES):
        place = tmp_path / "sites" / f"site-{number + 1}"
        place.mkdir(parents=True)
        rows_of(size, number).to_csv(place / "rows.csv", index=False)
        own = '[data]\nloader = "csv"\npath = "rows.csv"\n[limits]\nsamples = 3\n'
        (place / "site.toml").write_text(own)
    return {
        "schema": {"features": FEATURES, "label": LABEL, "group": GROUPS},
        "problem": {"kind": "tabular", "folder": str(tmp_path / "sites")},
        "algorithm": {"kind": "FedAvg", "step_size": 0.1},
        "run": {"rounds": 2, "precision": "float64"},
    }


def pooled():
    return pd.concat([rows_of(size, number) for number, size in enumerate(SIZES)])


def test_inputs_are_those_of_all_rows_together(study):
    """Medians and quartiles to a bin and a few rows; categories by how often a site has them."""
    problem = resolve("x", study).cells[""][0]
    preprocessing, table = preprocessing_of(problem), pooled()
    fitted, mask = preprocessing.fitted, np.asarray(problem.samples.mask)
    x = np.asarray(problem.samples.values["x"])[mask]
    for name, width in {"age": 0.1, "stay": 0.01}.items():
        if name == "stay":
            values = np.sort(table[name].to_numpy())
            for share, found in zip((0.25, 0.5, 0.75), fitted[name]["quartiles"], strict=True):
                rank = share * len(values)  # each site may join fewer than 3 rows with others
                near = np.clip([np.floor(rank) - 9, np.ceil(rank) + 8], 0, len(values) - 1)
                low, high = values[near.astype(int)]
                assert low - width <= found <= high + width
    low, median, high = fitted["stay"]["quartiles"]
    np.testing.assert_allclose(x[:, 1], (table["stay"] - median) / (high - low), atol=1e-12)
    middle = fitted["age"]["quartiles"][1]
    age = (table["age"].fillna(middle) - fitted["age"]["mean"]) / fitted["age"]["deviation"]
    np.testing.assert_allclose(x[:, 0], age, atol=1e-12)
    assert fitted["ward"]["categories"] == ["A", "B", *[f"own {n}" for n in range(4)]]
    assert preprocessing.names[2:] == [
        f"ward={word}" for word in [*fitted["ward"]["categories"], "(other)", "(missing)"]
    ]
    ward = table["ward"].replace({"rare": "(other)", "": "(missing)"})
    expected = pd.get_dummies(ward)[
        [name.removeprefix("ward=") for name in preprocessing.names[2:]]
    ]
    np.testing.assert_array_equal(x[:, 2:], expected)
    np.testing.assert_array_equal(
        np.asarray(problem.samples.values["group_region"])[mask],
        table["region"].map({"coast": 0, "hills": 1, "plain": 2}),
    )


def test_quartiles_of_whole_counts_are_those_of_a_robust_scaler(study, tmp_path):
    """With `samples = 1` nothing is joined, so a quartile is right to the width of a bin."""
    for path in owners_files(study["problem"]["folder"]):
        path.write_text(path.read_text().replace("samples = 3", "samples = 1"))
    low, median, high = preprocessing_of(resolve("x", study).cells[""][0]).fitted["stay"][
        "quartiles"
    ]
    scaler = RobustScaler().fit(pooled()[["stay"]])
    values = np.sort(pooled()["stay"])
    assert [low, median, high] == pytest.approx(
        [values[int(np.ceil(q * len(values))) - 1] for q in (0.25, 0.5, 0.75)], abs=0.01
    )
    assert median == pytest.approx(scaler.center_[0], abs=0.2)  # it interpolates between values
    assert high - low == pytest.approx(scaler.scale_[0], abs=0.4)


def test_a_deployment_finds_the_same(study, tmp_path, monkeypatch):
    """The sums of four sites that read their own files, through the deployed server and sites."""
    simulated = preprocessing_of(resolve("x", study).cells[""][0]).fitted
    tables = Tables(resolve("x", study).resolved)
    sums = resolve("sums", tables.sums())
    assert sums.deploy["alarms"] == "note"  # a site with many rows has large sums
    problem, algorithm = sums.cells[""]
    owners = owners_files(study["problem"]["folder"])

    class Own(Wires):
        def start(self, site):
            kept, self.problem = self.problem, site_problem(problem, owners[number_of(site)])
            monkeypatch.setitem(SITES, site, (0, 1))
            super().start(site)
            self.problem = kept

    def number_of(site):
        return int(site[-1]) - 1

    run, _ = deploy(problem, algorithm, Own(problem, algorithm, tmp_path), tmp_path / "server", 2)
    found = fitted_by(run, {"missing": {}})
    assert found["ward"] == simulated["ward"]
    for name in ("age", "stay"):
        assert found[name]["quartiles"] == pytest.approx(simulated[name]["quartiles"], rel=1e-12)
        assert found[name]["mean"] == pytest.approx(simulated[name]["mean"], rel=1e-13)
    ready = resolve("x", tables.fitted(found)).cells[""][0]
    own = site_problem(ready, owners[0])
    np.testing.assert_allclose(
        np.asarray(own.samples.values["x"])[0],
        np.asarray(resolve("x", study).cells[""][0].samples.values["x"])[0, : SIZES[0]],
        atol=1e-12,
    )


def test_an_owner_may_forbid_categories_and_wants_rows_behind_a_sum(study):
    owner = owners_files(study["problem"]["folder"])[1]
    text = owner.read_text()
    sums = resolve("sums", Tables(resolve("x", study).resolved).sums()).cells[""][0]
    owner.write_text(text + "words = false\n")
    assert not Limits.of(tomllib.loads(owner.read_text())).words
    for make in (lambda: resolve("x", study).cells[""], lambda: site_problem(sums, owner)):
        with pytest.raises(fs.InvalidInput, match="name those of 'ward' in the schema"):
            make()
    owner.write_text(text.replace("samples = 3", "samples = 24"))
    with pytest.raises(fs.InvalidInput, match="values in the column 'age', and its owner wants at"):
        site_problem(sums, owner)
    owner.write_text(text + "words = 1\n")
    with pytest.raises(fs.InvalidInput, match=r"limits\.words takes true or false"):
        resolve("x", study)


def test_predictions_use_what_was_found(study, tmp_path):
    done = fs.experiments.run(resolve("study", study), out=tmp_path / "run")
    (tmp_path / "new.csv").write_text("age,stay,ward\n,10,never seen\n50,10,A\n")
    found = fs.experiments.predict(done.folder, tmp_path / "new.csv")
    preprocessing = preprocessing_of(done.runs[""][0].problem)
    fitted, names, x = preprocessing.fitted, preprocessing.names, np.zeros((2, 10))
    middle = fitted["age"]["quartiles"][1]
    x[:, 0] = (np.array([middle, 50]) - fitted["age"]["mean"]) / fitted["age"]["deviation"]
    low, median, high = fitted["stay"]["quartiles"]
    x[:, 1] = (10 - median) / (high - low)
    x[0, names.index("ward=(other)")] = x[1, names.index("ward=A")] = 1
    params = done.runs[""][0].best.params
    score = x @ np.asarray(params.weight)[0] + float(params.bias[0])
    np.testing.assert_allclose(found["probability"], 1 / (1 + np.exp(-score)), rtol=1e-5)


def test_constraints_of_two_group_columns(study):
    study["problem"]["constraint"] = [
        {"kind": "demographic_parity", "group": "sex", "at_most": 0.1},
        {"kind": "group_loss", "group": "region", "at_most": 0.7},
    ]
    problem = resolve("x", study).cells[""][0]
    parts = problem.constraint.parts
    assert [cell.key for cell in parts[1].cells] == ["coast", "hills", "plain"]
    run = fs.solve(problem, fs.FedSGM(0.5, 0.01), rounds=3)
    mask = np.asarray(problem.samples.mask)
    data = {k: np.asarray(v)[mask] for k, v in problem.samples.values.items()}
    score = data["x"] @ np.asarray(run.params.weight)[0] + float(run.params.bias[0])
    loss = np.logaddexp(0, np.where(data["y"] == 1, -score, score))
    worst = max(loss[data["group_region"] == code].mean() for code in range(3))
    found = [run.history[name][-1] for name in run.history if "group_loss" in name]
    assert max(found) == pytest.approx(worst, abs=1e-5)
    study["problem"]["constraint"] = {"kind": "group_loss", "group": "race", "at_most": 0.7}
    with pytest.raises(fs.InvalidInput, match="'race' is not a group of the data: 'sex', 'region'"):
        resolve("x", study)


def test_few_rows_are_joined(study):
    """Every number that is not 0 has at least `samples` rows behind it; none is lost."""
    rng = np.random.default_rng(0)
    for size in (1, 4, 5, 12, 300):
        values = np.concatenate([rng.exponential(9, size).clip(0, 99), np.full(size // 3, 50.0)])
        exact = histogram_of(values, 0.0, 100.0, 200, samples=1)
        np.testing.assert_array_equal(exact, np.histogram(values, 200, (0, 100))[0])
        found = histogram_of(values, 0.0, 100.0, 200, samples=5)
        assert found.sum() == pytest.approx(len(values))
        ends = np.flatnonzero(np.diff(found, prepend=-1, append=-1))
        blocks = [found[a:b].sum() for a, b in itertools.pairwise(ends)]
        assert all(b == 0 or b >= 5 - 1e-9 for b in blocks) or len(values) < 5
        moved = np.abs(np.cumsum(found) - np.cumsum(exact)).max()
        assert moved < 10 or len(values) < 5
    ties = histogram_of(np.array([1.0, 1, 9, 9]), 0.0, 10.0, 10, samples=1)
    assert quantiles_of(ties / 3, 0.0, 10.0, [0.5]) == [2.0]  # half of the rows are in the bin to 2
    for n in range(2, 60):  # rounding does not push a tie beyond a gap
        evenly = np.full(n, 1 / n)
        halves = np.concatenate([evenly, np.zeros(3), evenly])
        assert quantiles_of(halves, 0.0, 2.0 * n + 3, [0.5]) == [pytest.approx(n)]


def test_words_come_out_of_sums():
    """Of many clients, divided by their number as averaging divides; or a sentence."""
    rng = np.random.default_rng(0)
    known = [f"ward {n} ü" for n in range(MOST_WORDS)]
    each = [sorted(rng.choice(known, 20, replace=False)) for _ in range(300)]
    mean = sum(cells_of(words) / 300 for words in each)
    assert words_in_cells("ward", mean, 300) == sorted({w for words in each for w in words})
    many = sum(cells_of([f"{n} {m}" for m in range(60)]) for n in range(20))
    with pytest.raises(fs.InvalidInput, match="'ward' has more than 64 different categories"):
        words_in_cells("ward", many, 1)
    with pytest.raises(fs.InvalidInput, match="has more than 64 different categories"):
        words_of("ward", np.array([str(n) for n in range(65)] * 5, object), 5)
    with pytest.raises(fs.InvalidInput, match="at most 40 bytes"):
        words_of("ward", np.array(["long " * 10] * 5, object), 5)
    assert words_of("ward", np.array(["b", "a", "b", "", ""], object), 2) == ["b"]
    assert _alone(3 * _row("bb")) == "bb"
    assert _alone(_row("aa") + _row("cc")) is None  # their mean reads as "bb", but for the checksum
    with pytest.raises(fs.InvalidInput, match="No site has a category"):
        words_in_cells("ward", cells_of([]), 3)
    wrong = cells_of(["A"])
    wrong[3, 0] = -1
    with pytest.raises(fs.InvalidInput, match="'ward'"):
        words_in_cells("ward", wrong, 1)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"kind": "numeric", "missing": "median"}, "needs least and most"),
        ({"kind": "numeric", "scaling": "robust"}, 'scaling is "deviation" or "quartiles"'),
        ({"kind": "numeric", "bins": 1}, "bins is a number from 2"),
        ({"kind": "numeric", "scaling": "quartiles", "least": 1, "most": 1}, "least below most"),
        ({"kind": "categorical", "categories": "all"}, "takes a list of different words"),
        ({"kind": "categorical", "categories": "collect", "missing": "A"}, 'takes "category"'),
    ],
)
def test_a_feature_that_is_wrong_is_told_in_one_sentence(study, table, sentence):
    study["schema"]["features"] = FEATURES | {"age": table}
    with pytest.raises(fs.InvalidInput, match=sentence):
        resolve("x", study)


def test_a_schema_may_stand_in_its_own_table(study, tmp_path):
    """It is the same as under [problem]; said twice, or of another problem, it is refused."""
    (tmp_path / "study.toml").write_text(tomli_w.dumps(study))
    read = fs.experiments.read(tmp_path / "study.toml")
    assert read["problem"] == study["problem"] | study["schema"]
    assert "schema" not in resolve("x", study).resolved
    twice = study | {"problem": study["problem"] | {"label": LABEL}}
    with pytest.raises(fs.InvalidInput, match=r"schema\.label and problem\.label say the same"):
        resolve("x", twice)
    with pytest.raises(fs.InvalidInput, match=r"schema\.'labels' is not a known key"):
        resolve("x", study | {"schema": {"labels": LABEL}})
    other = study | {"problem": {"kind": "neyman_pearson"}}
    with pytest.raises(fs.InvalidInput, match=r'is for problem\.kind = "tabular"'):
        resolve("x", other)
    assert Source.of_site(owners_files(study["problem"]["folder"])[0]).samples == 3
