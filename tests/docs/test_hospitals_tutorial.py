"""The tutorial on four hospitals works as it stands there."""

import shlex
import subprocess
import sys

import pandas as pd
import pytest

from tests.support.documents import blocks

PAGE = "docs/tutorials/hospitals.md"


def files(folder):
    exec(blocks("docs/tutorials/hospitals.md")[0], {})
    plain, west, experiment = blocks(PAGE, "toml")
    for city in ("east", "north", "south"):
        (folder / "hospitals" / city / "site.toml").write_text(plain)
    (folder / "hospitals/west/site.toml").write_text(west)
    (folder / "tumours.toml").write_text(experiment)


def commands():
    lines = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


def run(words, folder):
    done = [sys.executable, "-m", *words]
    found = subprocess.run(done, cwd=folder, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_simulation_is_feasible_and_audited(tmp_path, monkeypatch):
    """Its files, the first command, the audit and the prediction, on the simulation's folder."""
    monkeypatch.chdir(tmp_path)
    files(tmp_path)
    first, _, *others = commands()
    assert "Best model: " in run(first, tmp_path)
    said = [run([w.replace("-deployed", "") for w in words], tmp_path) for words in others]
    assert "sensitivity" in said[4]
    assert (tmp_path / "runs/tumours/audit.json").exists()
    found = pd.read_csv(tmp_path / "predictions.csv")
    patients = pd.read_csv(tmp_path / "hospitals/west/patients.csv", sep=";", decimal=",")
    right = found["prediction"].str[0].str.upper() == patients["diagnosis"]
    assert right.mean() > 0.85


@pytest.mark.slow  # a server and four sites
def test_the_whole_tutorial_works(tmp_path, monkeypatch):
    pytest.importorskip("nvflare")
    monkeypatch.chdir(tmp_path)
    files(tmp_path)
    for words in commands():
        run(words, tmp_path)
    one, other = (
        pd.read_csv(tmp_path / f"runs/{name}/history.csv")
        for name in ("tumours", "tumours-deployed")
    )
    assert abs(one["objective"] - other["objective"]).max() < 1e-10
