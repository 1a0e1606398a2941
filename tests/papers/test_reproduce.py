"""`fedsolve reproduce`: the catalogue, runs from the command line, the page of results."""

import dataclasses
import importlib
import inspect
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedsolve as fs
from fedsolve import plots
from fedsolve.experiments import config
from fedsolve.experiments import registry as kinds
from fedsolve.experiments import run_folder as folder
from fedsolve.papers import catalogue, reproduce
from fedsolve.papers import pages as results
from fedsolve.papers.catalogue import Entry

DOCS = Path(__file__).parents[2] / "docs"
PAPERS = {  # every figure and table that the papers have
    "fedsgm": (7, 2),
    "fedsgm-unbiased": (1, 0),
    "ppbc": (9, 6),
    "incentfedavg": (2, 0),
    "fedadmm": (5, 1),
}
OTHERS = {"ppbc/decisive", "ppbc/decisive-cnn", "flamby/tcga-brca"}


def test_every_figure_and_table_is_there():
    expected = {
        f"{paper}/{kind}-{number}"
        for paper, counts in PAPERS.items()
        for kind, count in zip(("figure", "table"), counts, strict=True)
        for number in range(1, count + 1)
    }
    assert catalogue.catalogue().keys() == expected | OTHERS


def test_the_list_tells_state_and_cost(fedsolve, monkeypatch):
    monkeypatch.setattr("fedsolve.cli.main.out.width", 160)
    for words in (["reproduce"], ["reproduce", "--list"]):
        status, out, _ = fedsolve(*words)
        assert status == 0
        for entry in catalogue.catalogue().values():
            line = next(line for line in out.splitlines() if f" {entry.name} " in line)
            assert entry.state in line
            assert all(cost in line for cost in catalogue.costs(entry))


RUNNABLE = [entry for entry in catalogue.catalogue().values() if entry.experiments]


@pytest.mark.parametrize("entry", RUNNABLE, ids=lambda entry: entry.name)
def test_experiments_of_the_catalogue_can_be_built(entry):
    """Problems that need data by their signature alone, and all algorithms for real."""
    assert entry.state in catalogue.STATES
    assert entry.state == "whole" or entry.note
    for quick in (False, True):
        variants = set()
        for table in catalogue.tables(entry, quick).values():
            assert table["variants"], "no variant is left"
            variants |= table["variants"].keys()
            stand_in = {"kind": "neyman_pearson"}
            for changes in table["variants"].values():
                for key in [key for key in changes if key.startswith("problem.")]:
                    table["problem"][key.removeprefix("problem.")] = changes.pop(key)
            make = kinds.PROBLEMS[table["problem"].pop("kind")]
            own = {key: value for key, value in table["problem"].items() if key != "pooled"}
            inspect.signature(make).bind(**own)
            if table["algorithm"]["kind"] != "IncentFedAvg":  # whose game needs the data
                config.resolve("x", table | {"problem": stand_in})
        assert variants >= entry.paper.keys() or quick
        chosen = (quick and entry.quick.get("variants")) or entry.variants
        assert variants >= set(chosen)


def test_a_reproduction_from_the_command_line(fedsolve, tmp_path):
    words = ["reproduce", "fedsgm-unbiased/figure-1", "--quick", "-o", "out"]
    status, told, _ = fedsolve(*words)
    assert status == 0
    assert "2 runs, about 18 s on 2 cores" in " ".join(told.split())
    out, name = tmp_path / "out", "fedsgm-unbiased-figure-1"
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    data = pd.read_csv(out / "data.csv")
    assert len(data) == 2 * 100
    summary = json.loads((out / "summary.json").read_text())
    assert summary["command"] == "fedsolve reproduce fedsgm-unbiased/figure-1 --quick"
    assert summary["size"] == "quick"
    assert summary["version"] == fs.__version__
    assert summary["seconds"] > 0
    for row in summary["numbers"][name]:
        own = data[data["variant"] == row["variant"]]
        g = own["constraint"].to_numpy()
        assert row["objective"] == pytest.approx([own["objective"].tail(20).mean(), 0], rel=1e-5)
        first = np.flatnonzero(g <= 0.1)[0]
        assert row["violations"] == [(g[first:] > 0.1).sum(), 0]
    page = (out / "page.md").read_text()
    for expected in (f"({name}.png)", "| hard |", "`fedsolve reproduce", "Quick version", "cores"):
        assert expected in page

    # A reproduction that was stopped goes on from its checkpoints, and comes to the same.
    own_folder = out / "runs" / name
    (own_folder / "run.json").write_text('{"status": "running"}')
    (own_folder / "history.csv").unlink()
    assert fedsolve(*words)[0] == 0
    again = json.loads((out / "summary.json").read_text())
    assert again["numbers"] == summary["numbers"]
    # What is finished is not run again.
    before = (own_folder / "history.csv").stat().st_mtime_ns
    assert fedsolve(*words)[0] == 0
    assert (own_folder / "history.csv").stat().st_mtime_ns == before

    status, _, told = fedsolve(*words, "--seeds", 2)
    assert status == 2
    assert "out is of another reproduction; choose a folder with -o." in told

    (tmp_path / "all").mkdir()
    out.rename(tmp_path / "all" / "mine")
    (tmp_path / "found").mkdir()
    (tmp_path / "all").rename(tmp_path / "found" / "all")
    status, told, _ = fedsolve("reproduce", "--page", "page.md", "-o", "found")
    assert status == 0
    assert "Written to page.md: 1 figures and tables." in told
    whole = (tmp_path / "page.md").read_text()
    assert f"](page/fedsgm-unbiased/figure-1/{name}.png)" in whole
    assert (tmp_path / "page/fedsgm-unbiased/figure-1" / f"{name}.png").is_file()
    for entry in catalogue.catalogue().values():
        assert f"[{entry.name}](#" in whole


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fedsgm/figure-11"], "is not a known figure or table; did you mean 'fedsgm/figure-1'?"),
        (["fedsgm/table-2"], "There is nothing to run for fedsgm/table-2"),
        (["fedsgm/figure-1", "--seeds", "-1"], "--seeds must be"),
        (["fedsgm/figure-1", "--seeds", "0"], "--seeds must be"),
        (["fedsgm/figure-1", "-o", "full"], "full exists and is not empty"),
        (["fedsgm/figure-1", "--page", "page.md"], "name no figure beside it"),
        (["fedsgm/figure-1", "--only", "soft"], "--only is for studies such as ppbc/decisive"),
        (["ppbc/decisive", "--only", "FedProx"], "No row is named by 'FedProx'"),
        (["--page", "nowhere/page.md"], "Cannot write nowhere/page.md"),
    ],
)
def test_bad_input_raises_one_sentence(fedsolve, tmp_path, words, sentence):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    status, _, told = fedsolve("reproduce", *words)
    assert status == 2
    assert sentence in told
    assert told.count("\n") == 1
    assert not (tmp_path / "reproduced").exists()


def test_missing_data_raise_one_sentence(fedsolve, tmp_path, monkeypatch):
    def refused(name):
        raise fs.InvalidInput(f"{name} is neither in FEDSOLVE_DATA nor to be had.")

    monkeypatch.setattr(importlib.import_module("fedsolve.problems.images"), "load", refused)
    status, _, told = fedsolve("reproduce", "incentfedavg/figure-1", "--quick")
    assert status == 2
    assert "mnist is neither in FEDSOLVE_DATA" in told
    assert not (tmp_path / "reproduced").exists()


def test_an_experiment_stopped_before_its_last_variant_is_kept(tmp_path):
    run = fs.solve(fs.problems.neyman_pearson(clients=5), fs.FedSGM(0.1, 0.05), rounds=2)
    settings = {"run": {"rounds": 2, "stop": {}}}
    runs = {"a: k = 1": [run], "b: k = 1": []}
    folder.save(tmp_path, runs, settings, "interrupted", "Stopped.")
    assert set(folder.read(tmp_path).table["variant"]) == {"a: k = 1"}
    assert (tmp_path / "plot.png").is_file()


def test_methods_by_a_number_are_one_table_a_measure():
    paper = {"A: k_0 = 5": {"seconds": 73}}
    columns = "CR", "seconds"
    entry = catalogue.Entry("x/figure-2", "", picture="rounds", columns=columns, paper=paper)
    rows = [
        {"variant": "A: k_0 = 1", "seeds": 1, "CR": [20.0, 0.0], "seconds": [0.5, 0.0]},
        {"variant": "A: k_0 = 5", "seeds": 1, "CR": None, "seconds": [2.0, 0.0]},
        {"variant": "B, (30): k_0 = 5", "seeds": 3, "CR": [8.0, 1.0], "seconds": [1.0, 0.25]},
    ]
    assert results._numbers(entry, rows).splitlines() == [
        "| CR, k_0 = | 1 | 5 |",
        "|---|---|---|",
        "| A | 20 | not reached |",
        "| B, (30) |  | 8 ± 1 |",
        "",
        "| seconds, k_0 = | 1 | 5 |",
        "|---|---|---|",
        "| A | 0.500 | 2.00 (paper: 73.0) |",
        "| B, (30) |  | 1.00 ± 0.25 |",
    ]


def test_experiments_are_joined_and_those_without_data_left_out(tmp_path, monkeypatch):
    """Runs by another rule are shown with the others; quick versions may be of one experiment."""
    entry = catalogue.find("fedadmm/figure-2")
    changes = {"run.rounds": 3, "run.seeds": [0], "problem.size": 3}
    pair = ("fedadmm-figure-2", "fedadmm-figure-2-rule")
    entry = dataclasses.replace(entry, experiments=pair, set=changes, optional=())
    read = config.read

    def fewer(name):
        table = read(name)
        kept = list(table["variants"].items())[:2]
        return table | {"variants": dict(kept)}

    monkeypatch.setattr(config, "read", fewer)
    experiments = reproduce.plan(entry)
    assert list(experiments) == list(pair)
    by = reproduce.begin(tmp_path / "x", {})
    made = reproduce.Reproduction(entry, False, None, tmp_path / "x", experiments, by)
    assert [result.status for result in made.run()] == ["finished", "finished"]
    summary = made.finish()
    assert summary["pictures"] == ["fedadmm-figure-2.png"]
    names = [row["variant"] for row in summary["numbers"]["fedadmm-figure-2"]]
    assert [name.partition(":")[0] for name in names] == ["FedADMM"] * 2 + ["FedADMM, (30)"] * 2

    def missing(*_):
        raise fs.InvalidInput("no such data.")

    monkeypatch.setattr(config.Experiment, "cell", missing)
    with pytest.warns(UserWarning, match="is left out: no such data") as told:
        left = reproduce.plan(dataclasses.replace(entry, optional=pair))
    assert [str(each.message) for each in told] == [
        f"{name} is left out: no such data." for name in pair
    ]
    assert not left


def test_effort_has_a_panel_of_seconds_where_runs_have_them():
    history = {"round": np.arange(1, 4)}
    runs = [
        reproduce.Recorded(history, fs.FedADMM(), seed=0, allowed=9, seconds=s) for s in (1.0, 2.0)
    ]
    timed = {"A: k_0 = 1": runs, "A: k_0 = 5": runs}
    untimed = {k: [dataclasses.replace(r, seconds=np.nan) for r in v] for k, v in timed.items()}
    assert [axis.get_ylabel() for axis in plots.effort(timed).axes] == ["Rounds", "Seconds"]
    assert [axis.get_ylabel() for axis in plots.effort(untimed).axes] == ["Rounds"]
    line = plots.effort(timed).axes[1].lines[0]
    np.testing.assert_allclose(line.get_xydata(), [[1, 1.5], [5, 1.5]])


def test_measures():
    history = {
        "round": np.arange(10, 101, 10),
        "constraint": np.array([1.0, 0, 1, 0, 0, 0, 0, 0, 0.2, 0.4]),
        "reward": np.arange(10.0),
        "epochs": np.arange(10, 101, 10) // 20,
        "steps": np.full(10, np.nan),
    }
    run = reproduce.Recorded(history, fs.FedSGM(0.1, 0.3), seed=0, allowed=200)
    for column, expected in {
        "reward": 8.5,
        "reward@30": 2,
        "reward@500": np.nan,
        "reward@end": 9,
        "reward@2 epochs": 3,
        "reward@30 steps": 2,  # only other variants have them: rounds
        "constraint": 0.3,
        "over": 0.5,
        "worst": 0.4,
        "step_size": 0.1,
        "deviation": 0.1,
        "violations": 2,
        "CR": 200,
        "test_accuracy": np.nan,
    }.items():
        assert reproduce.measured(column, run) == pytest.approx(expected, nan_ok=True), column


def test_measures_by_messages():
    """The last value within the budget; of PPBC where an epoch ended; none if it is not used up."""
    history = {
        "round": np.arange(1, 7),
        "vectors_up_total": np.array([3, 6, 19, 22, 25, 38]),
        "reward": np.arange(6.0),
    }
    run = reproduce.Recorded(history, fs.FedSGM(0.1, 0.3), seed=0, allowed=200)
    for messages, expected in {6: 1, 24: 3, 38: 5, 39: np.nan, 2: np.nan}.items():
        found = reproduce.measured(f"reward@{messages} messages", run)
        assert found == pytest.approx(expected, nan_ok=True)
    history["epoch_end"] = np.array([0.0, 0, 1, 0, 0, 1])
    assert reproduce.measured("reward@24 messages", run) == 2
    assert np.isnan(reproduce.measured("reward@18 messages", run))


def test_a_small_version_may_be_measured_otherwise():
    own = {"columns": ["test_accuracy@960 messages"], "against": "vectors_up_total"}
    usual = Entry("ppbc/table-1", "", quick=own | {"minutes": 1, "set": {}}, columns=["objective"])
    assert usual.shown("full") is usual
    small = usual.shown("quick")
    assert (small.columns, small.against) == (own["columns"], own["against"])
    assert small.quick == usual.quick


def test_a_page_shows_what_was_measured():
    """A small version from before its columns changed is shown with those that it has."""
    own = {"columns": ["objective@960 messages"], "minutes": 1, "set": {}}
    entry = Entry("ppbc/table-1", "", quick=own, columns=["objective@end"])
    made = {"size": "quick", "changes": {}, "command": "x", "date": "", "version": "0"}
    made |= {"machine": "", "pictures": ["a.png"]}
    headings = {"objective@end": "f, end", own["columns"][0]: "f, after 960 messages"}
    for column, heading in headings.items():
        numbers = {"a": [{"variant": "one", "seeds": 1, column: [0.5, 0.0]}]}
        text = results.part(entry, made | {"numbers": numbers})
        assert f"| {heading} |" in text
        assert "| one | 0.500 |" in text


def test_a_full_reproduction_is_not_replaced_by_a_quick_one(tmp_path):
    for size in ("full", "quick"):
        made = tmp_path / "found" / "x" / size
        made.mkdir(parents=True)
        facts = {"date": "2026-11-16", "version": "0", "machine": "", "changes": {}, "seconds": 1}
        facts |= {"command": "x", "pictures": [], "numbers": {}}
        summary = {"name": "fedsgm/figure-1", "size": size} | facts
        (made / "summary.json").write_text(json.dumps(summary))
    assert results.whole_page(tmp_path / "page.md", tmp_path / "found") == ["fedsgm/figure-1"]
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert next(line for line in lines if "fedsgm/figure-1]" in line).endswith("| full |")


def test_the_page_of_results_is_what_the_command_writes(tmp_path):
    """A change of the catalogue or of a summary asks for `fedsolve reproduce --page`."""
    text, _ = results.whole(DOCS / "results")
    assert (DOCS / "results.md").read_text() == text
