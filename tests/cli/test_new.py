"""`fedsolve new` asks a few questions and writes files that run."""

import io
import sys
import tomllib

import pytest

from tests.support import hospitals
from tests.support.commands import fedsolve  # noqa: F401


@pytest.fixture
def answers(monkeypatch):
    def give(*words):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(map(str, words)) + "\n"))

    return give


def test_its_files_run(fedsolve, answers, tmp_path):  # noqa: F811
    (tmp_path / "data").mkdir()
    hospitals.write(tmp_path / "data", sizes=(30, 20))
    answers("study", "data", "died", "yes", "equal_opportunity", "0.2", "sex")
    status, said, told = fedsolve("new", "mine")
    assert status == 0, told
    assert "Next: fedsolve run mine/study.toml" in said
    table = tomllib.loads((tmp_path / "mine/study.toml").read_text())["problem"]
    assert table["label"] == {"column": "died", "positive": "yes", "negative": "no"}
    assert table["group"]["column"] == "sex"
    assert table["constraint"] == {"kind": "equal_opportunity", "at_most": 0.2}
    kinds = {name: each["kind"] for name, each in table["features"].items()}
    assert kinds == {
        "age": "numeric",
        "pressure": "numeric",
        "stage": "categorical",
        "smoker": "binary",
    }
    assert table["features"]["age"]["missing"] == "mean"
    own = tomllib.loads((tmp_path / "mine/site.toml").read_text())["data"]
    assert own == {"loader": "csv", "path": "hospital-0.csv", "test": 0.2}
    status, _, told = fedsolve("run", "mine/study.toml", "--rounds", "2", "--out", "x")
    assert status == 0, told


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("a b",), "A name has letters, digits, - and _, got 'a b'"),
        (("study", "nowhere.csv"), "nowhere.csv cannot be read"),
        (("study", "data", "blood"), "'blood' is not one of sex, age"),
        (("study", "data", "stage"), "The column 'stage' needs two words, and has I, II, III"),
        (("study", "data", "died", "maybe"), "'maybe' is not one of no, yes"),
        (("study", "data", "died", "yes", "accuracy"), "'accuracy' is not one of none,"),
    ],
)
def test_wrong_answers_get_a_sentence(fedsolve, answers, tmp_path, words, sentence):  # noqa: F811
    (tmp_path / "data").mkdir()
    hospitals.write(tmp_path / "data", sizes=(20,))
    answers(*words)
    status, _, told = fedsolve("new")
    assert status == 2
    assert sentence in told.replace("\n", " ")
    assert not list(tmp_path.glob("*.toml"))


def test_files_are_never_overwritten(fedsolve, answers, tmp_path):  # noqa: F811
    (tmp_path / "site.toml").write_text("mine")
    answers("study")
    status, _, told = fedsolve("new")
    assert (status, (tmp_path / "site.toml").read_text()) == (2, "mine")
    assert "site.toml exists already" in told
