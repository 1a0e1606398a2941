"""What terminals and notebooks show of problems, algorithms, runs and sweeps."""

import io
import sys

import numpy as np
import pandas as pd
import pytest

import fedsolve as fs
from fedsolve.runtimes.history import History
from fedsolve.solving import progress_bar
from fedsolve.solving.progress_bar import Bar


@pytest.fixture(scope="module")
def problem():
    return fs.problems.neyman_pearson(clients=4)


@pytest.fixture(scope="module")
def swept(problem):
    several = {"hard": fs.FedSGM(0.3, 0.05), "penalty": fs.PenaltyFedAvg(0.1, rho=5.0)}
    return fs.sweep(problem, several, rounds=3, seeds=[0, 1])


def test_a_sweep_takes_several_algorithms(problem, swept):
    assert list(swept.table["algorithm"]) == ["hard", "hard", "penalty", "penalty"]
    alone = fs.solve(problem, fs.FedSGM(0.3, 0.05), rounds=3, seed=1)
    np.testing.assert_allclose(swept[1].history["objective"], alone.history["objective"], rtol=1e-5)
    pair = fs.sweep(problem, [fs.FedSGM(0.3, 0.05), fs.FedSGM(0.1, 0.05)], rounds=2)
    assert list(pair.table["algorithm"]) == ["FedSGM 1", "FedSGM 2"]
    grid = fs.sweep(problem, [fs.FedSGM(0.3, 0.05), fs.FedAvg(0.3)], rounds=2, step_size=[1, 0.1])
    assert grid.table[["algorithm", "step_size"]].to_numpy().tolist() == [
        ["FedSGM", 1], ["FedSGM", 0.1], ["FedAvg", 1], ["FedAvg", 0.1],
    ]  # fmt: skip
    with pytest.raises(fs.InvalidInput, match="algorithm is an algorithm, or several in a list"):
        fs.sweep(problem, [3], rounds=2)


def test_the_text_of_a_table_has_every_number(swept, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = repr(swept.table)
    assert "..." not in text
    assert max(map(len, text.splitlines())) <= 80
    for name in swept.table:
        assert name in text
    for name in ("objective", "constraint"):
        for value in swept.table[name]:
            assert f"{value:.6f}" in text
    assert repr(swept) == text
    assert "objective" in swept._repr_html_()


def test_tables_are_exported(swept, tmp_path):
    swept.to_csv(tmp_path / "a.csv")
    kept = pd.read_csv(tmp_path / "a.csv")
    np.testing.assert_allclose(kept["objective"], swept.table["objective"])
    swept.to_csv(tmp_path / "b.csv", history=True)
    assert len(pd.read_csv(tmp_path / "b.csv")) == 4 * 3
    swept[0].to_csv(tmp_path / "c.csv")
    assert pd.read_csv(tmp_path / "c.csv")["round"].tolist() == [1, 2, 3]
    text = swept.to_latex(tmp_path / "a.tex", digits=3)
    assert (tmp_path / "a.tex").read_text() == text
    lines = text.splitlines()
    assert lines[:4] == [
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r"algorithm & seed & round & objective & constraint \\",
        r"\midrule",
    ]
    first = swept.table.iloc[0]
    assert lines[4] == rf"hard & 0 & 3 & {first['objective']:.3g} & {first['constraint']:.3g} \\"
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    assert r"bytes\_up" in swept.to_latex(columns=["bytes_up"])
    with pytest.raises(fs.InvalidInput, match="There is no column 'loss'"):
        swept.to_latex(columns=["loss"])


def test_notebooks_show_what_things_are(problem, swept):
    assert "clients</th><td>4<" in problem._repr_html_()
    assert "step_size" in fs.FedSGM(0.3, 0.05)._repr_html_()
    text = swept[0]._repr_html_()
    assert f"{swept[0].history['objective'][-1]:.6g}" in text
    named = {"<script>": fs.FedAvg(0.1)}
    assert "<script>" not in fs.sweep(problem, named, rounds=1)._repr_html_()


def entry(objective, constraint):
    columns = {"round": [1], "objective": [objective], "constraint": [constraint]}
    return History({name: np.array(values) for name, values in columns.items()})


def test_the_bar_shows_the_newest_values_of_runs_that_take_time(monkeypatch):
    now, shown = [0.0], []
    monkeypatch.setattr(progress_bar.time, "perf_counter", lambda: now[0])
    bar = Bar(lambda text, part: shown.append((text, part)))
    bar(0, 100, entry(3.0, 0.2))  # compiled
    now[0] = 0.5
    bar(10, 100, entry(2.0, 0.1))
    assert shown == []
    now[0] = 2.0
    bar(20, 100, entry(1.5, 0.05))
    assert shown == [("round 20/100  f 1.5  g 0.05  8 s left", 0.2)]
    bar.close()
    assert shown[-1] == ("", 1.0)
    short = []
    Bar(lambda text, part: short.append(text)).close()
    assert short == []


def test_a_bar_is_shown_in_terminals_only(problem, monkeypatch):
    assert progress_bar.default_bar() is None  # output goes to pytest
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_bar, "WAIT", 0.0)
    fs.solve(problem, fs.FedSGM(0.3, 0.05), rounds=300)
    assert "round 300/300" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    for options in ({"progress": False}, {"progress": lambda *news: None}):
        terminal.truncate(0)
        fs.solve(problem, fs.FedSGM(0.3, 0.05), rounds=2, **options)
        assert "round" not in terminal.getvalue()
    monkeypatch.setenv("FEDSOLVE_PROGRESS", "0")
    assert progress_bar.default_bar() is None
