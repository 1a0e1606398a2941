"""The study at equal messages: what it runs, what it measures, and what it writes."""

import dataclasses
import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedsolve as fs
from fedsolve.papers import decisive
from tests.support import examples


def test_every_framework_meets_every_strategy():
    for case in decisive.CASES:
        rows = case.rows(2400)
        names = {(row.framework, row.strategy) for row in rows}
        expected = {(f, s) for f in decisive.ORDER for s in decisive.STRATEGIES}
        assert names == expected | {("F3AST", "its own"), ("FedAvg", "everyone")}
        assert len(names) == len(rows)
        steps = {getattr(row.algorithm, "local_steps") for row in rows}  # noqa: B009
        assert steps == {case.local_steps}
    assert len({case.name for case in decisive.CASES}) == len(decisive.CASES)


def test_problems_are_those_of_the_issue():
    """Both data sets, features, all partitions, E = 1 and 5; and CIFAR-10 with all images."""
    few = {dataclasses.replace(case, samples=2000) for case in decisive.CASES if case.samples}
    assert len(few) == 2 * 2 * 3 * 2
    whole = [case for case in decisive.CASES if case.samples is None]
    assert {dataclasses.replace(case, samples=2000) for case in whole} == {
        case for case in few if case.dataset == "cifar10"
    }
    assert {case.images for case in whole} == {50_000}


def test_only_some_rows(tmp_path):
    def study(only, seeds=None):
        return decisive.Decisive("ppbc/decisive", False, seeds, tmp_path, {}, only)

    whole = study("mnist-2000-pca-distr-2-E1 PPBC retained")
    ((case, rows),) = whole.wanted.items()
    assert case == decisive.Case("mnist", "pca", "distr-2", 1)
    assert [row.framework for row in rows] == ["PPBC, retained"] * 5
    assert whole.command.endswith("--only 'mnist-2000-pca-distr-2-E1 PPBC retained'")
    assert "1 problems with 5 rows" in whole.announcement
    with pytest.raises(fs.InvalidInput, match="No row is named by 'FedProx'; a name is 'cif"):
        study("FedProx").check()


def test_rows_of_different_budgets_are_not_compared():
    rows = synthetic()
    decisive.check_equal_budgets(rows)
    less = rows["framework"].eq("MIFA") & rows["budget"].eq(600)
    with pytest.raises(fs.InvalidInput, match="Rows of cifar10 have different budgets of messages"):
        decisive.check_equal_budgets(rows[~less])


def test_the_best_step_is_not_at_the_end_of_the_grid():
    for best in (0.01, 0.4, 9.0):
        tried = []

        def loss(step, best=best, tried=tried):
            tried.append(step)
            return np.inf if step > 90 * best else np.log(step / best) ** 2

        found = decisive.searched(loss, 0.4)
        assert abs(np.log2(found / best)) <= 0.5 + 1e-9
        assert min(tried) < found < max(tried)
    two_minima = {0.1: 0.2, 0.2: 3.0, 0.4: 2.0, 0.8: 1.0, 1.6: 2.0, 0.05: 0.3}
    assert decisive.searched(lambda step: two_minima[round(step, 3)], 0.4) == 0.1


def test_measures_are_taken_where_the_budget_is_used_up():
    problem = fs.problems.linear_regression(clients=10, size=4)
    run = fs.solve(problem, fs.SCAFFOLD(0.01, participants=3), 20, precision="float64")
    accuracy = np.linspace(0, 1, 20)
    run = dataclasses.replace(
        run, history=type(run.history)(run.history | {"test_accuracy": accuracy})
    )
    found = {(m["unit"], m["budget"]): m for m in decisive.measured(run, 0.5, [30, 60])}
    by_messages = found["messages", 30]
    assert by_messages["used"] == 30
    assert by_messages["gap"] == run.history["objective"][9] - 0.5
    assert by_messages["accuracy"] == accuracy[9]
    by_bytes = found["bytes", 30 * 4 * 8]  # SCAFFOLD sends two vectors: half the rounds
    assert by_bytes["gap"] == run.history["objective"][4] - 0.5
    # of PPBC, at ends of epochs only
    algorithm = fs.PPBC(0.01, epoch_length=4, select_epoch=fs.participation.Random(3))
    run = fs.solve(problem, algorithm, 20, precision="float64")
    run = dataclasses.replace(
        run, history=type(run.history)(run.history | {"test_accuracy": accuracy})
    )
    (first, *_) = decisive.measured(run, 0.0, [50])
    assert first["used"] == 44  # two epochs of 4·3 + 10
    assert first["gap"] == run.history["objective"][7]


def synthetic():
    """Measurements of two problems, three seeds."""
    rows = []
    for case in decisive.CASES[:2]:
        for row in case.rows(600):
            for seed in range(3):
                for budget in (300, 600):
                    rows.append(
                        case.about
                        | {"framework": row.framework, "strategy": row.strategy, "seed": seed}
                        | {"step_size": 0.1, "steps_tried": 3, "alpha": None, "p": None}
                        | {"unit": "messages", "budget": budget, "used": budget, "rounds": 9}
                        | {"gap": 10.0 ** -(seed + 1), "accuracy": 0.5}
                    )
    return pd.DataFrame(rows)


def test_tables_have_geometric_means_over_seeds():
    first, second = decisive.tables(synthetic())
    assert first.startswith("## cifar10, 2000 images, pca, distr-3, E = 1")
    assert "| PPBC, retained | 1.0e-02 ×÷6.6, 50.0 % |" in first
    assert "| FedAvg, everyone | 1.0e-02 ×÷6.6, 50.0 % |" in second
    broken = synthetic()
    broken.loc[broken["framework"] == "FedDyn", "gap"] = np.inf
    assert "| FedDyn | diverges |" in next(iter(decisive.tables(broken)))


def test_a_study_without_results_has_nothing_to_write(tmp_path):
    study = decisive.Decisive("ppbc/decisive", True, None, tmp_path, {})
    with pytest.raises(fs.InvalidInput, match="There are no results"):
        study.finish()


def test_pictures_and_pages_are_written_from_the_rows(tmp_path):
    study = decisive.Decisive("ppbc/decisive", True, None, tmp_path, {"date": "today"})
    (tmp_path / "rows/a").mkdir(parents=True)
    found = {"seconds": 1.0, "rows": synthetic().to_dict("records")}
    (tmp_path / "rows/a/b.json").write_text(json.dumps(found))
    study.finish()
    assert (tmp_path / "decisive.png").read_bytes().startswith(b"\x89PNG")
    assert "distr-3" in (tmp_path / "page.md").read_text()
    assert len(pd.read_csv(tmp_path / "data.csv")) == len(synthetic())


@pytest.mark.slow
@examples.needs_data("mnist")
def test_a_row_is_tuned_on_the_first_seed_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSOLVE_DATA", str(examples.DATA))

    def few(case, budget, rows=decisive.Case.rows):
        chosen = {"FedAvg + GNS", "PPBC, retained + GNS", "FedAvg + everyone"}
        return [row for row in rows(case, budget) if row.name in chosen]

    monkeypatch.setattr(decisive.Case, "rows", few)
    monkeypatch.setattr(decisive, "QUICK", [decisive.Case("mnist", "pca", "distr-2", 1, 1000)])
    study = decisive.Decisive("ppbc/decisive", True, 2, tmp_path, {})
    assert list(study.run()) == []
    files = sorted((tmp_path / "rows").glob("*/*.json"))
    assert len(files) == 3
    table: Any = study.table()
    end = table[(table["unit"] == "messages") & (table["budget"] == 600)]
    gaps = end.groupby("framework")["gap"].mean()
    assert (gaps > 0).all()
    assert set(end[end["strategy"] == "GNS"]["seed"]) == {0, 1}
    assert (end["steps_tried"] >= 3).all()
    before = [file.stat().st_mtime_ns for file in files]
    assert list(study.run()) == []
    assert [file.stat().st_mtime_ns for file in files] == before
    (result,) = decisive.Decisive("ppbc/decisive", True, 2, tmp_path / "x", {}).run(
        interrupted=lambda: True
    )
    assert result.status == "interrupted"
