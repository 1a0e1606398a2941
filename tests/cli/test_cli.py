"""The command line as a user types it, and the folder that a run leaves."""

import csv
import json
import signal
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import fedsolve as fs
from tests.support.examples import DATA


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_its_folder(tmp_path):
    """A real process, as a user starts it."""
    command = [sys.executable, "-m", "fedsolve", "run", "neyman-pearson", "--rounds", "30"]
    done = subprocess.run(
        [*command, "--seed", "3", "--out", "first"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Written to first" in done.stdout
    folder = tmp_path / "first"
    assert {path.name for path in folder.iterdir()} >= {
        "config.toml",
        "run.json",
        "history.csv",
        "params.safetensors",
        "plot.png",
    }
    expected = fs.solve(
        fs.problems.neyman_pearson(clients=20),
        fs.FedSGM(
            0.3,
            0.05,
            fs.Soft(40.0),
            participants=10,
            local_steps=5,
            uplink=fs.TopK(0.1),
            downlink=fs.TopK(0.1),
        ),
        rounds=30,
        seed=3,
    )
    history = rows(folder / "history.csv")
    assert len(history) == 30
    for name in ("round", "objective", "constraint", "switch", "bytes_up", "bytes_down"):
        np.testing.assert_allclose(
            [float(row[name]) for row in history], expected.history[name], rtol=1e-5
        )
    arrays = load_file(folder / "params.safetensors")
    np.testing.assert_allclose(arrays["seed-3/params"], expected.params, rtol=1e-5)
    np.testing.assert_allclose(arrays["seed-3/average"], expected.average, rtol=1e-5)
    facts = json.loads((folder / "run.json").read_text())
    assert facts["status"] == "finished"
    assert facts["versions"]["jax"] == metadata.version("jax")
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["run"] == {"rounds": 30, "seed": 3}
    assert config["algorithm"]["switching"] == {"kind": "Soft", "beta": 40.0}


def test_a_runs_configuration_runs_again(fedsolve, tmp_path):
    assert fedsolve("run", "neyman-pearson", "--rounds", 5, "--out", "a")[0] == 0
    assert fedsolve("run", "a/config.toml", "--out", "b")[0] == 0
    assert (tmp_path / "a/history.csv").read_text() == (tmp_path / "b/history.csv").read_text()
    assert (tmp_path / "a/config.toml").read_text() == (tmp_path / "b/config.toml").read_text()


def test_set_changes_any_key(fedsolve, tmp_path):
    changes = [
        "algorithm.step_size=0.01",
        "algorithm.switching=Hard",
        "algorithm.uplink.fraction=0.2",
    ]
    words = [word for change in changes for word in ("--set", change)]
    status, _, _ = fedsolve("run", "neyman-pearson", "--rounds", 3, *words, "--out", "x")
    assert status == 0
    config = tomllib.loads((tmp_path / "x/config.toml").read_text())["algorithm"]
    assert config["step_size"] == 0.01
    assert config["switching"] == {"kind": "Hard"}
    assert config["uplink"] == {"kind": "TopK", "fraction": 0.2}


def test_variants_and_seeds_are_one_tidy_history(fedsolve, tmp_path):
    status, out, _ = fedsolve("run", "fedsgm-figure-1", "--rounds", 4, "--out", "x")
    assert status == 0
    history = rows(tmp_path / "x/history.csv")
    variants = ("hard", "soft, β = 40", "soft, β = 80", "soft, β = 120")
    assert len(history) == 4 * 3 * 4
    assert {(row["variant"], row["seed"]) for row in history} == {
        (variant, seed) for variant in variants for seed in "012"
    }
    assert out.count("hard") == 3


def test_folders_are_never_overwritten(fedsolve, tmp_path):
    for expected in ("neyman-pearson", "neyman-pearson-2"):
        assert f"runs/{expected}" in fedsolve("run", "neyman-pearson", "--rounds", 2)[1]
    before = (tmp_path / "runs/neyman-pearson/history.csv").read_bytes()
    status, _, told = fedsolve(
        "run", "neyman-pearson", "--rounds", 3, "--out", "runs/neyman-pearson"
    )
    assert status == 2
    assert "exists and is not empty" in told
    assert (tmp_path / "runs/neyman-pearson/history.csv").read_bytes() == before


def test_divergence_keeps_the_rounds_before(fedsolve, tmp_path):
    (tmp_path / "bad.toml").write_text(
        """
        problem = { kind = "neyman_pearson", clients = 5 }
        algorithm = { kind = "FedSGM", step_size = 1e38, tolerance = 0.05, local_steps = 3 }
        run = { rounds = 200 }
        """
    )
    status, out, told = fedsolve("run", "bad.toml", "--out", "x")
    assert status == 1
    assert "is not finite" in told
    assert "Round " in told
    assert "Written to x" in out
    facts = json.loads((tmp_path / "x/run.json").read_text())
    assert facts["status"] == "diverged"
    assert facts["message"] in " ".join(told.split())


def test_list_and_show_and_version(fedsolve):
    status, out, _ = fedsolve("list")
    assert status == 0
    for name in (
        "neyman-pearson",
        "FedSGM",
        "neyman_pearson",
        "TopK",
        "QSGD",
        "Soft",
        "Diminishing",
    ):
        assert name in out
    status, out, _ = fedsolve("show", "neyman-pearson", "--set", "algorithm.participants=7")
    assert status == 0
    shown = tomllib.loads(out)
    assert shown["algorithm"]["participants"] == 7
    assert shown["problem"] == {"kind": "neyman_pearson", "clients": 20, "seed": 0}
    assert fedsolve("--version")[1].strip() == f"fedsolve {fs.__version__}"


def test_a_file_in_the_way_of_the_folder(fedsolve, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, told = fedsolve("run", "neyman-pearson", "--rounds", 2, "--out", "file/x")
    assert status == 2
    assert "Cannot write to file/x: Not a directory" in told


BASE = """
problem = { kind = "neyman_pearson" }
algorithm = { kind = "FedSGM", step_size = 0.1 }
run = { rounds = 3 }
"""
WRONG = {
    "an unknown experiment": (["run", "neyman-person"], "did you mean 'neyman-pearson'?"),
    "no such file": (["run", "nothing.toml"], "There is no file nothing.toml"),
    "a wrong field": (
        ["run", "base.toml", "--set", "algorithm.stepsize=0.1"],
        "'stepsize' is not a known field of FedSGM; did you mean 'step_size'?",
    ),
    "a wrong section": (["run", "base.toml", "--set", "algoritm.x=1"], "did you mean 'algorithm'?"),
    "a wrong key of run": (["run", "base.toml", "--set", "run.round=1"], "did you mean 'rounds'?"),
    "a wrong kind": (
        ["run", "base.toml", "--set", "algorithm.uplink=TopKay"],
        "'TopKay' is not a known kind; did you mean 'TopK'?",
    ),
    "a word for a number": (
        ["run", "base.toml", "--set", "algorithm.step_size=abc"],
        "algorithm.step_size takes a number or the name of a part, got 'abc'.",
    ),
    "a wrong kind of schedule": (
        ["run", "base.toml", "--set", "algorithm.step_size=Cosin"],
        "'Cosin' is not a known kind; did you mean 'Cosine'?",
    ),
    "no sites": (
        ["deploy", "base.toml", "--local", "0"],
        "Cannot distribute 20 clients over 0 sites.",
    ),
    "a part in the wrong place": (
        ["run", "base.toml", "--set", "algorithm.uplink=Hard"],
        "algorithm.uplink must be a Compressor, got Hard()",
    ),
    "a missing field": (
        ["run", "base.toml", "--set", "algorithm.uplink=TopK"],
        "algorithm.uplink needs fraction",
    ),
    "a wrong value": (
        ["run", "base.toml", "--set", "algorithm.uplink={kind='TopK', fraction=3}"],
        "algorithm.uplink: TopK needs a fraction in (0, 1], got 3.",
    ),
    "a negative step": (
        ["run", "base.toml", "--set", "algorithm.step_size=-1"],
        "algorithm: step_size must be positive, got -1.0.",
    ),
    "too many participants": (
        ["run", "base.toml", "--set", "algorithm.participants=21"],
        "participants is 21, but there are only 20 clients.",
    ),
    "no rounds": (["run", "base.toml", "--rounds", "0"], "run.rounds must be a whole number"),
    "no assignment": (["run", "base.toml", "--set", "rounds"], "A setting is written as key=value"),
    "an unknown problem": (
        ["run", "base.toml", "--set", "problem.kind=neyman_pierson"],
        "did you mean 'neyman_pearson'?",
    ),
    "broken TOML": (["run", "broken.toml"], "broken.toml is not valid TOML"),
    "no algorithm": (["run", "empty.toml"], "The table [run] is missing."),
    "a precision of fancy": (
        ["run", "base.toml", "--set", "run.precision=float8"],
        'precision must be "float32" or "float64"',
    ),
    "an unknown option": (["run", "base.toml", "--fast"], "No such option"),
    "an unknown command": (["rum"], "No such command 'rum'"),
}


@pytest.mark.parametrize(("words", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_wrong_usage_prints_one_sentence_and_exits_with_status_2(
    fedsolve, tmp_path, words, sentence
):
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "broken.toml").write_text("a = = 3")
    (tmp_path / "empty.toml").write_text("")
    status, _, told = fedsolve(*words)
    assert status == 2
    assert sentence in " ".join(told.split())
    assert "Traceback" not in told
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_saves_the_run(tmp_path):
    command = [sys.executable, "-m", "fedsolve", "run", "neyman-pearson", "--rounds", "10000000"]
    process = subprocess.Popen(
        [*command, "--checkpoint-every", "100", "--out", "x"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "x/checkpoints/run-0").exists():  # it compiles, then runs
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    facts = json.loads((tmp_path / "x/run.json").read_text())
    assert facts["status"] == "interrupted"
    done = facts["rounds"]["seed-0"]
    assert 0 < done < 10_000_000
    assert len(rows(tmp_path / "x/history.csv")) == done


@pytest.mark.slow  # reads every dataset; test_reproduce looks at the algorithms
def test_every_experiment_resolves(fedsolve, monkeypatch):
    monkeypatch.setenv("FEDSOLVE_DATA", str(DATA))
    for scheme in ("http", "https"):  # nothing is downloaded here
        monkeypatch.setenv(f"{scheme}_proxy", "http://127.0.0.1:9")
    folder = Path(fs.__file__).parent / "experiments/configs"
    names = sorted(path.stem for path in folder.glob("*.toml"))
    assert "neyman-pearson" in names
    for name in names:
        status, out, told = fedsolve("show", name)
        if "is not on this machine" in told:  # its data, which cannot be had
            continue
        assert status == 0, told
        assert tomllib.loads(out)["title"]


def test_variants_may_pool_the_problem(fedsolve, tmp_path):
    (tmp_path / "pool.toml").write_text(
        """
        title = "all in one place"
        problem = { kind = "neyman_pearson", clients = 4 }
        algorithm = { kind = "FedSGM", step_size = 0.1, participants = 1 }
        run = { rounds = 2 }
        [variants]
        "apart: one" = {}
        "together: one" = { "problem.pooled" = true }
        """
    )
    assert fedsolve("run", "pool.toml", "--out", "x")[0] == 0
    assert fedsolve("run", "x/config.toml", "--out", "y")[0] == 0
    assert (tmp_path / "x/history.csv").read_text() == (tmp_path / "y/history.csv").read_text()
    assert (tmp_path / "x/trade-off.png").stat().st_size > 5000
    last = {row["variant"]: float(row["objective"]) for row in rows(tmp_path / "x/history.csv")}
    whole = fs.problems.neyman_pearson(clients=4).pooled()
    expected = fs.solve(whole, fs.FedSGM(0.1), rounds=2).history["objective"][-1]
    assert last["together: one"] == pytest.approx(expected, rel=1e-5)
    assert last["apart: one"] != pytest.approx(expected, rel=1e-5)
    status, _, told = fedsolve("run", "pool.toml", "--set", "problem.pooled=1")
    assert status == 2
    assert "problem.pooled must be true or false, got 1." in told


def test_a_seed_may_be_an_instance_of_the_problem(fedsolve, tmp_path):
    (tmp_path / "instances.toml").write_text(
        """
        title = "how many rounds, by k_0"
        problem = { kind = "linear_regression", clients = 6, size = 4, smallest = 5, largest = 8 }
        algorithm = { kind = "FedADMM", participants = 3 }
        run = { rounds = 99, seeds = [2, 5], instances = true, stop = { kind = "NearOptimum" } }
        [variants]
        "FedADMM: k_0 = 1" = { "algorithm.local_iterations" = 1 }
        "FedADMM: k_0 = 3" = { "algorithm.local_iterations" = 3 }
        """
    )
    assert fedsolve("run", "instances.toml", "--out", "x")[0] == 0
    assert (tmp_path / "x/rounds.png").stat().st_size > 5000
    found = json.loads((tmp_path / "x/run.json").read_text())["rounds"]
    for seed in (2, 5):
        problem = fs.problems.linear_regression(6, 4, 5, 8, seed=seed)
        algorithm = fs.FedADMM(participants=3, local_iterations=3)
        expected = fs.solve(problem, algorithm, 99, seed=seed, stop=fs.NearOptimum())
        assert found[f"FedADMM: k_0 = 3/seed-{seed}"] == expected.rounds < 99
    status, _, told = fedsolve("run", "instances.toml", "--set", "run.instances=2")
    assert status == 2
    assert "run.instances must be true or false, got 2." in told


def test_a_private_run_says_what_it_promises_and_does_not_judge_noise(fedsolve, tmp_path):
    pytest.importorskip("dp_accounting")
    words = ["--set", "run.privacy.epsilon=4", "--set", "run.privacy.clip=2", "--out", "x"]
    status, out, _ = fedsolve("run", "neyman-pearson", "--rounds", 8, *words)
    assert status == 0
    assert "Private for each of 20 clients: ε = 4 after 8 rounds, δ = 0.0371." in out
    assert "Norm of an answer and of the noise in their mean: measure 2, " in out
    assert "is not known to be feasible" in out
    last = rows(tmp_path / "x/history.csv")[-1]
    assert 3.9 < float(last["epsilon"]) <= 4
    assert float(last["objective_noise"]) == float(last["constraint_noise"]) > 0


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "adult").is_dir(), reason="needs adult below FEDSOLVE_DATA")
def test_fair_adult_becomes_private_by_one_key(fedsolve, monkeypatch):
    pytest.importorskip("dp_accounting")
    monkeypatch.setenv("FEDSOLVE_DATA", str(DATA))
    words = ["run", "fair-adult", "--set", "run.privacy.epsilon=4"]
    status, out, told = fedsolve(*words, "--rounds", 20, "--out", "x")
    assert status == 0
    assert "Private for each of 10 clients: ε = " in out
    assert "after 20 rounds, δ = 0.0794." in out
    assert "whether it is feasible is not known" in out
    assert "Feasible" not in out
    assert told.count("times as long as an answer may be") == 1  # of four variants
