"""Experiments run from Python: the same folder as the command's, resumed, interrupted, refused."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedsolve as fs

SMALL = {"problem.clients": 5, "algorithm.participants": 3}
RESULTS = ("config.toml", "history.csv", "params.safetensors", "history.safetensors", "plot.png")


def contents(folder):
    return {name: (folder / name).read_bytes() for name in RESULTS}


def test_the_folder_is_that_of_the_command(fedsolve, tmp_path):
    words = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    words += ["--rounds", 6, "--seed", 4, "--out", "command"]
    assert fedsolve("run", "neyman-pearson", *words)[0] == 0
    result = fs.experiments.run(
        "neyman-pearson", rounds=6, seed=4, settings=SMALL, out=tmp_path / "python"
    )
    assert result.status == "finished"
    assert (result.message, result.unsaved, result.untracked) == ("", "", ())
    assert result.folder == tmp_path / "python"
    assert contents(result.folder) == contents(tmp_path / "command")
    facts = [json.loads((tmp_path / n / "run.json").read_text()) for n in ("command", "python")]
    assert facts[0].keys() == facts[1].keys()
    (run,) = result.runs[""]
    assert (run.rounds, run.seed) == (6, 4)
    table = pd.read_csv(result.folder / "history.csv")
    np.testing.assert_allclose(table["objective"], run.history["objective"], rtol=1e-6)


def test_experiments_settings_and_variants(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = fs.experiments.read("neyman-pearson") | {
        "variants": {"hard": {"algorithm.switching": "Hard"}, "soft": {}}
    }
    ready = fs.experiments.resolve("mine", table)
    seen = []
    result = fs.experiments.run(
        ready,
        settings=["problem.clients=5", "algorithm.participants=3", "run.seeds=[0, 1]"],
        rounds=3,
        progress=lambda run, done, rounds, newest: seen.append((run.name, done, len(newest))),
    )
    assert result.folder == Path("runs/mine")
    assert {v: [r.seed for r in runs] for v, runs in result.runs.items()} == {
        "hard": [0, 1],
        "soft": [0, 1],
    }
    names = [f"{variant}/seed-{seed}" for variant in ("hard", "soft") for seed in (0, 1)]
    assert [name for name, done, _ in seen if done == 0] == names
    assert {name for name, done, _ in seen if done == 3} == set(names)
    again = fs.experiments.run(ready, rounds=2, seed=7, settings=SMALL)
    assert again.folder == Path("runs/mine-2")
    assert [run.seed for run in again.runs["soft"]] == [7]
    assert ready.options["rounds"] == 500  # it does not change


def test_resumed_to_the_same_bits(tmp_path):
    whole = fs.experiments.run("neyman-pearson", rounds=8, settings=SMALL, out=tmp_path / "a")
    fs.experiments.run("neyman-pearson", rounds=5, settings=SMALL, out=tmp_path / "b")
    result = fs.experiments.run(resume=tmp_path / "b", rounds=8)
    assert result.status == "finished"
    assert contents(result.folder) == contents(whole.folder)
    assert tomllib.loads((tmp_path / "b/config.toml").read_text())["run"]["rounds"] == 8


def test_interrupted_and_resumed(tmp_path):
    asked = []

    def interrupted():
        asked.append(True)
        return len(asked) > 2  # after two chunks of rounds

    result = fs.experiments.run(
        "neyman-pearson",
        rounds=100_000,
        settings=SMALL | {"run.seeds": [0, 1]},
        out=tmp_path / "x",
        interrupted=interrupted,
    )
    assert result.status == "interrupted"
    assert result.message.startswith("Stopped by the user after round ")
    (run,) = result.runs[""]
    assert 0 < run.rounds < 100_000
    facts = json.loads((tmp_path / "x/run.json").read_text())
    assert (facts["status"], facts["message"]) == ("interrupted", result.message)
    assert facts["rounds"] == {"seed-0": run.rounds}
    with pytest.raises(fs.InvalidInput, match=f"has done {run.rounds} rounds, more than 1"):
        fs.experiments.run(resume=tmp_path / "x", rounds=1)
    done = fs.experiments.run(resume=tmp_path / "x", rounds=run.rounds + 1)
    assert done.status == "finished"
    assert [each.rounds for each in done.runs[""]] == [run.rounds + 1] * 2


def test_divergence_is_a_status(tmp_path):
    settings = SMALL | {"algorithm.step_size": 1e38}
    result = fs.experiments.run("neyman-pearson", settings=settings, out=tmp_path / "x")
    assert result.status == "diverged"
    assert "is not finite" in result.message
    assert json.loads((tmp_path / "x/run.json").read_text())["status"] == "diverged"


class Deaf(fs.Tracker):
    """A tracker that cannot be reached."""

    def begin(self, run):
        raise ConnectionError("nobody there")


def test_entries_that_a_tracker_missed_are_reported(tmp_path):
    with pytest.warns(UserWarning, match="does not answer .nobody there"):
        result = fs.experiments.run(
            "neyman-pearson",
            rounds=2,
            settings=SMALL,
            out=tmp_path / "x",
            track=[f"{__name__}:Deaf"],
        )
    assert result.status == "finished"
    (missed,) = result.untracked
    assert "did not get seed-0 after round 0, the files (nobody there)" in missed


BAD = {
    "nothing": ({}, "Name an experiment to run, or a folder to resume."),
    "an unknown name": ({"experiment": "neyman-person"}, "did you mean 'neyman-pearson'?"),
    "no such file": ({"experiment": "x.toml"}, "There is no file x.toml"),
    "no rounds": ({"experiment": "neyman-pearson", "rounds": 0}, "run.rounds must be"),
    "a setting without a value": (
        {"experiment": "neyman-pearson", "settings": ["algorithm.step_size"]},
        "A setting is written as key=value, got 'algorithm.step_size'.",
    ),
    "an object as a setting": (
        {"experiment": "neyman-pearson", "settings": {"algorithm.uplink": fs.TopK(0.1)}},
        "The setting 'algorithm.uplink' must be a number, a string, a list or a table, got TopK",
    ),
    "no interval": (
        {"experiment": "neyman-pearson", "checkpoint_every": "5 days"},
        "checkpoint_every must be a whole number of rounds, or a time",
    ),
    "an unknown tracker": (
        {"experiment": "neyman-pearson", "track": ["wandb"]},
        "'wandb' is not a known tracker",
    ),
    "more than rounds on resume": (
        {"resume": "there", "seed": 1},
        "With resume only the number of rounds may change.",
    ),
    "no folder to resume": ({"resume": "nowhere"}, "nowhere is not the folder of a run"),
}


@pytest.mark.parametrize(("given", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_an_exception_and_leaves_no_file(tmp_path, monkeypatch, given, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fs.InvalidInput) as error:
        fs.experiments.run(**given)
    assert sentence in str(error.value)
    assert not list(tmp_path.iterdir())
