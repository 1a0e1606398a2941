"""Problems from CSV files: reading, preprocessing, and the same numbers in a deployment."""

import tomllib

import numpy as np
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import fedsolve as fs
from fedsolve.data.table_files import Source
from fedsolve.data.tables import Schema, load_table, read_table
from fedsolve.flare.site_config import check_data, site_problem
from fedsolve.problems.table_sums import SumsLoss, fitted_at
from fedsolve.problems.tables import preprocessing_of
from tests.support import hospitals
from tests.support.documents import blocks
from tests.support.in_process import SITES, Wires, deploy

SCHEMA = Schema.of(hospitals.FEATURES, hospitals.LABEL, hospitals.GROUP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("hospitals")
    hospitals.write(place, sizes=(40, 25, 30, 22, 50, 35))
    return place


def pooled(folder):
    """All files as one pandas table."""
    import pandas as pd

    return pd.concat([pd.read_csv(file, dtype=str) for file in sorted(folder.glob("*.csv"))])


def test_inputs_are_those_of_a_pooled_pipeline(folder):
    """Means, deviations, imputation and categories, against scikit-learn on all rows."""
    problem = hospitals.problem(folder)
    table = pooled(folder)
    numbers = table[["age", "pressure"]].astype(float)
    scaler = StandardScaler().fit(numbers)
    scaled = np.asarray(scaler.transform(numbers))
    age, pressure = scaled[:, 0], scaled[:, 1]
    mean_then_scaled = np.where(np.isnan(age), 0, age)
    stands_for = ((120 - np.asarray(scaler.mean_)) / np.asarray(scaler.scale_))[1]
    stage = table["stage"].fillna("(missing)").to_numpy()
    expected = np.stack(
        [
            mean_then_scaled,
            np.where(np.isnan(pressure), stands_for, pressure),
            *(stage == word for word in ("I", "II", "III", "(missing)")),
            table["smoker"] == "yes",
        ],
        axis=1,
    )
    mask = np.asarray(problem.samples.mask)
    got = np.asarray(problem.samples.values["x"])[mask]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
    assert (got[:, 2:] == expected[:, 2:]).all()
    np.testing.assert_array_equal(
        np.asarray(problem.samples.values["y"])[mask], table["died"] == "yes"
    )
    np.testing.assert_array_equal(
        np.asarray(problem.samples.values["protected"])[mask], table["sex"] == "F"
    )
    names = preprocessing_of(problem).names
    assert names == [
        *("age", "pressure", "stage=I", "stage=II", "stage=III", "stage=(missing)", "smoker")
    ]


def test_whole_numbers_give_exact_means(tmp_path):
    """Sums of whole numbers have no rounding: a mean does not depend on who has which row."""
    values = [3, 5, 8, 1, 9, 4]
    for name, own in {"a": values[:1], "b": values[1:]}.items():
        rows = "".join(f"{value},yes\n" for value in own)
        (tmp_path / f"{name}.csv").write_text("x,y\n" + rows)
    label = {"column": "y", "positive": "yes", "negative": "no"}
    problem = fs.problems.tabular({"x": {"kind": "numeric"}}, label, folder=tmp_path)
    found = preprocessing_of(problem).fitted["x"]
    assert found["mean"] == np.mean(values) == 5
    assert found["deviation"] == pytest.approx(np.std(values), rel=1e-15)
    # equal values are not divided by their rounding error
    (tmp_path / "a.csv").write_text("x,y\n0.1,yes\n")
    (tmp_path / "b.csv").write_text("x,y\n0.1,no\n0.1,no\n")
    problem = fs.problems.tabular({"x": {"kind": "numeric"}}, label, folder=tmp_path)
    assert preprocessing_of(problem).fitted["x"]["deviation"] == 1


def test_two_rounds_of_averaging_give_the_sums(folder):
    problem = hospitals.problem(folder)
    files = sorted(folder.glob("*.csv"))
    sums = fs.problems.tabular_sums(hospitals.FEATURES, hospitals.LABEL)
    objective = sums.given[0]
    assert isinstance(objective, SumsLoss)
    sums = sums.with_clients(objective.read_clients(files, Source()))
    run = fs.solve(sums, fs.FedAvg(1.0), rounds=2, precision="float64")
    expected = preprocessing_of(problem).fitted
    for name, entry in fitted_at(sums, run.params).items():
        for key, value in entry.items():
            assert value == pytest.approx(expected[name][key], rel=1e-14)


TABLES = [
    {"kind": "equal_opportunity", "at_most": 0.1, "tolerance": 0.02},
    {"kind": "sensitivity", "at_least": 0.6, "per": "client"},
]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"constraint": "demographic_parity", "bound": 0.1}, id="gap", marks=pytest.mark.slow
        ),
        pytest.param({"constraint": TABLES}, id="by name"),
    ],
)
def test_a_deployment_from_own_files_gives_the_simulations_numbers(folder, tmp_path, options):
    """Sites read their own files; six clients at four sites."""
    problem = hospitals.problem(folder, batch_size=8, **options)
    fitted = preprocessing_of(problem).fitted
    blank = hospitals.problem(None, batch_size=8, fitted=fitted, **options)
    files = sorted(folder.glob("*.csv"))

    class Own(Wires):
        """Sites with their own files."""

        def start(self, site):
            first, count = SITES[site]
            names = [str(file) for file in files[first : first + count]]
            owned = tmp_path / f"{site}.toml"
            owned.write_text(f'[data]\nloader = "csv"\npath = {names!r}\n')
            kept, self.problem = self.problem, site_problem(blank, owned)
            place = SITES[site]
            SITES[site] = (0, count)
            try:
                super().start(site)
            finally:
                SITES[site], self.problem = place, kept

    algorithm = fs.FedSGM(0.1, 0.05, participants=4, local_steps=2, uplink=fs.TopK(0.5))
    simulated = fs.solve(problem, algorithm, rounds=6, precision="float64")
    wires = Own(problem, algorithm, tmp_path)
    deployed, _ = deploy(blank, algorithm, wires, tmp_path / "server", 6)
    assert deployed.best.round == simulated.best.round
    for name in simulated.history.keys() - {"uplink_error", "cohort"}:
        if not name.startswith("constraint") and name not in ("objective", "equal_opportunity"):
            continue
        np.testing.assert_allclose(
            deployed.history[name], simulated.history[name], rtol=0, atol=1e-12
        )
    np.testing.assert_array_equal(deployed.history["bytes_up"], simulated.history["bytes_up"])


def test_a_constraint_from_a_table_is_that_of_the_function(folder):
    problem = hospitals.problem(folder, constraint={"kind": "equal_opportunity", "at_most": 0.2})
    bound = problem.constraint
    assert isinstance(bound, fs.constraints.SampleMeans)
    assert [cell.key for cell in bound.cells] == ["M", "F"]
    assert (bound.label, bound.group, bound.bound) == ("y", "protected", 0.2)
    several = hospitals.problem(folder, constraint=TABLES).constraint
    assert isinstance(several, fs.Several)
    assert several.tolerances == (0.02, 0.0)
    assert isinstance(several.parts[1], fs.EachClient)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"kind": "equal_chances"}, "constraint.kind: 'equal_chances' is not a known constraint"),
        ({"kind": "equal_opportunity"}, "constraint needs at_most"),
        (
            {"kind": "equal_opportunity", "at_most": 0.1, "group": "race"},
            "constraint.group: 'race' is not a group of the data: 'sex'",
        ),
        ({"kind": "sensitivity", "at_least": 2.0}, "at_least is a rate, from 0 to 1"),
        ({"kind": "sensitivity", "at_least": 0.5, "share": 0.5}, "share is for per"),
        ([{"kind": "sensitivity"}], r"constraint\[0\] needs at_least"),
        ([{"kind": 3}], r"constraint\[0\] takes a table with its kind"),
        ([{"kind": "sensitivity", "at_least": 0.5, "groups": ["a"]}], "come with the data"),
    ],
)
def test_a_table_that_is_wrong_is_told_in_one_sentence(folder, table, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        hospitals.problem(folder, constraint=table)


def test_a_bound_beside_a_table_is_refused(folder):
    with pytest.raises(fs.InvalidInput, match="give at_most in it"):
        hospitals.problem(folder, constraint=TABLES, bound=0.1)


def test_a_site_without_the_rows_of_a_rate_is_refused(tmp_path):
    """Client 1 has nobody who died, so its own sensitivity is not known."""
    for name, died in {"a": "yes", "b": "no"}.items():
        (tmp_path / f"{name}.csv").write_text(f"x,y\n1,{died}\n2,no\n")
    label = {"column": "y", "positive": "yes", "negative": "no"}
    table = {"kind": "sensitivity", "at_least": 0.5, "per": "client"}
    with pytest.raises(fs.InvalidInput, match="Client 1 has no samples for sensitivity of y = 1"):
        fs.problems.tabular({"x": {"kind": "numeric"}}, label, folder=tmp_path, constraint=table)


def test_logistic_regression_reaches_scikit_learns(folder):
    """With equal weights of rows, the optimum is that of the pooled regression (unregularised)."""
    problem = hospitals.problem(folder).pooled()
    run = fs.solve(
        problem, fs.FedAvg(1.0, local_steps=20), rounds=100, precision="float64", evaluate_every=100
    )
    table = pooled(folder)
    encode = ColumnTransformer(
        [
            ("age", make_pipeline(StandardScaler(), SimpleImputer(strategy="mean")), ["age"]),
            (
                "pressure",
                make_pipeline(
                    SimpleImputer(strategy="constant", fill_value=120.0), StandardScaler()
                ),
                ["pressure"],
            ),
            ("words", OneHotEncoder(), ["stage", "smoker"]),
        ]
    )
    table["stage"] = table["stage"].fillna("(missing)")
    numbers = table.astype({"age": float, "pressure": float})
    y = (table["died"] == "yes").to_numpy()
    model = LogisticRegression(C=np.inf, max_iter=1000, tol=1e-10)
    best = make_pipeline(encode, model).fit(numbers, y).predict_proba(numbers)[:, 1]
    least = -np.mean(np.where(y, np.log(best), np.log(1 - best)))
    assert run.history["objective"][-1] == pytest.approx(least, abs=1e-4)
    assert run.history["objective"][-1] >= least - 1e-6


def test_the_network_and_the_gap(folder):
    problem = hospitals.problem(
        folder, model="network", width=4, depth=2, constraint="equal_opportunity", bound=0.25
    )
    assert problem.dimension == (7 + 1) * 4 + 5 * 4 + 5
    flat = hospitals.problem(folder, constraint="demographic_parity", bound=0.25)
    run = fs.solve(flat, fs.FedSGM(0.5, 0.01), rounds=1)
    data = {k: np.asarray(v)[np.asarray(flat.samples.mask)] for k, v in flat.samples.values.items()}
    model = run.params
    rate = 1 / (1 + np.exp(-(data["x"] @ np.asarray(model.weight)[0] + float(model.bias[0]))))
    of = data["protected"] == 1
    expected = abs(rate[of].mean() - rate[~of].mean()) - 0.25
    assert run.history["constraint"][-1] == pytest.approx(expected, abs=1e-6)


GOOD = "age,pressure,stage,smoker,died,sex\n70,120,I,yes,no,F\n55,,II,no,yes,M\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GOOD.replace("smoker", "smokes"), "x.csv has no column 'smoker'; did you mean 'smokes'?"),
        (GOOD.replace("II,", "IV,"), "x.csv, row 3, column 'stage': 'IV' is not one of I, II, III"),
        (GOOD.replace("70", "old"), "x.csv, row 2, column 'age': 'old' is not a number"),
        (GOOD.replace("70", "inf"), "row 2, column 'age': 'inf' is not a number"),
        (GOOD.replace("70", "1_0"), "row 2, column 'age': '1_0' is not a number"),
        (GOOD.replace("70", "131"), "row 2, column 'age': '131' is above the largest value"),
        (GOOD.replace("70", "-1"), "row 2, column 'age': '-1' is below the least value"),
        (GOOD.replace("yes,no", ",no"), "x.csv, row 2, column 'smoker': the value is missing, and"),
        (GOOD.replace(",yes,M", ",,M"), "row 3, column 'died': the value is missing"),
        (GOOD.replace(",F", ",X"), "row 2, column 'sex': 'X' is not one of M, F"),
        ("", "x.csv is empty"),
        ("\n \n", "x.csv is empty"),
        (GOOD.splitlines()[0], "x.csv has a header but no rows"),
        (GOOD + "1,2\n", "x.csv, row 4: it has 2 values, and the header has 6"),
        (GOOD.replace("sex", "age"), "x.csv has 2 columns named 'age'"),
        (GOOD.replace(",", ";"), "is the separator ','?"),
        (GOOD + '"open', "x.csv is not a CSV file: "),
        (GOOD.replace("I,", "\xe9,").encode("latin-1"), "x.csv, row 2: the text is not utf-8"),
    ],
)
def test_a_file_that_does_not_fit_is_told_in_one_sentence(tmp_path, text, sentence):
    (tmp_path / "x.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(fs.InvalidInput) as found:
        load_table(SCHEMA, tmp_path / "x.csv")
    assert sentence in str(found.value)
    assert "\n" not in str(found.value)


def test_all_issues_of_a_file_are_found(tmp_path):
    (tmp_path / "x.csv").write_text(GOOD + "x,1,V,yes,no,F\n")
    _, issues = read_table(SCHEMA, tmp_path / "x.csv")
    assert [issue[:3] for issue in issues] == [
        ("not a number", 4, "age"),
        ("unknown category", 4, "stage"),
    ]
    with pytest.raises(fs.InvalidInput, match=r"row 4, column 'age'.*\(1 more like this"):
        load_table(SCHEMA, tmp_path / "x.csv")


def test_a_site_has_its_own_names_units_and_words(tmp_path):
    """Another separator, decimal sign, encoding, names, units and words give the same table."""
    (tmp_path / "x.csv").write_text("\ufeff" + GOOD, encoding="utf-8")  # as Excel writes it
    plain = load_table(SCHEMA, tmp_path / "x.csv")
    own = "Alter;Druck in kPa;stage;raucht;died;sex\n"
    own += "70,0;15,998684;I;j\xe4;no;F\n55;-;II;nein;yes;M\n"
    (tmp_path / "own.csv").write_bytes(own.encode("latin-1"))
    site = """[data]
        loader = "csv"
        path = "own.csv"
        separator = ";"
        decimal = ","
        encoding = "latin-1"
        missing = ["-"]
        [data.columns]
        age = "Alter"
        pressure = { column = "Druck in kPa", factor = 7.50061683 }
        smoker = { column = "raucht", words = { "jä" = "yes", nein = "no" } }
        """
    (tmp_path / "site.toml").write_text(site, encoding="utf-8")
    check_data(tmp_path / "site.toml")
    fitted = {name: {"mean": 0, "deviation": 1} for name in ("age", "pressure")}
    problem = site_problem(hospitals.problem(None, fitted=fitted), tmp_path / "site.toml")
    x = np.asarray(problem.samples.values["x"])[0]
    preprocessing = preprocessing_of(hospitals.problem(None, fitted=fitted))
    np.testing.assert_allclose(x, preprocessing.inputs(plain), atol=1e-6)


def test_dates_are_days(tmp_path):
    label = {"column": "y", "positive": "yes", "negative": "no"}
    (tmp_path / "x.csv").write_text("day,y\n1970-01-02,yes\n2024-02-29,no\n,no\n")
    date = {"kind": "date", "least": "1970-01-01", "missing": "1970-01-11"}
    problem = fs.problems.tabular(
        {"day": date}, label, folder=tmp_path, fitted={"day": {"mean": 1, "deviation": 2}}
    )
    days = np.asarray(problem.samples.values["x"])[0, :, 0]
    np.testing.assert_allclose(days, [0, (19782 - 1) / 2, 4.5])
    (tmp_path / "x.csv").write_text("day,y\n31.5.2024,yes\n")
    with pytest.raises(fs.InvalidInput, match="is not a date, such as"):
        fs.problems.tabular({"day": date}, label, folder=tmp_path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"features": {}}, "features takes a table"),
        ({"features": {"a": {"kind": "text"}}}, "features.a needs a kind: numeric, date, categ"),
        ({"features": {"a": {"kind": "numeric", "unit": "m"}}}, "features.a has no key 'unit'"),
        ({"features": {"a": {"kind": "numeric", "missing": "median"}}}, "takes a number"),
        ({"features": {"a": {"kind": "numeric", "least": 2, "most": 1}}}, "is above"),
        ({"features": {"a": {"kind": "binary", "values": ["x"]}}}, "takes two words"),
        ({"features": {"a": {"kind": "categorical"}}}, "takes a list of different words"),
        ({"features": {"died": {"kind": "numeric"}}}, "must not be among the features"),
        ({"label": {"column": "y", "positive": "a"}}, "label.negative takes a word"),
        ({"label": {"column": "y", "positive": "a", "negative": "a"}}, "are the same word"),
        ({"constraint": "parity"}, 'constraint must be "demographic_parity" or'),
        ({"constraint": "demographic_parity", "group": None}, "is between two groups"),
        ({"constraint": "demographic_parity", "bound": 1.5}, "bound is a gap"),
        ({"model": "forest"}, "model must be one of logistic, network"),
        ({"folder": "nowhere"}, "There are no CSV files in the folder nowhere"),
        ({"folder": None}, "tabular needs a folder of CSV files, or `fitted`"),
        ({"fitted": {"age": {"mean": 0}}}, "fitted.age takes a table with mean and deviation"),
    ],
)
def test_a_schema_that_is_wrong_is_told_in_one_sentence(folder, changes, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence.replace("(", r"\(")):
        hospitals.problem(**({"folder": folder} | changes))


def test_the_page_on_tables_works(tmp_path, monkeypatch):
    """Its experiment runs on a folder of files, and its site's file is understood."""
    experiment, site = blocks("docs/tables.md", "toml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hospitals").mkdir()
    hospitals.write(tmp_path / "hospitals", sizes=(30, 20))
    table = tomllib.loads(experiment)
    ready = fs.experiments.resolve("tables", table)
    assert ready.cells[""][0].n == 2
    assert ready.resolved["problem"]["features"] == table["problem"]["features"]
    (tmp_path / "site.toml").write_text(site)
    check_data(tmp_path / "site.toml")
