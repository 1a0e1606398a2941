"""The rule that chooses step sizes, and a reproduction that uses it."""

import json

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.experiments import config
from fedsolve.papers import catalogue, reproduce, tuning
from fedsolve.papers.tuning import Tried

ROUNDS = 20


def experiment(variants, seeds):
    table = config.read("fedsgm-figure-1")
    table["run"] |= {"rounds": ROUNDS, "seeds": seeds}
    table["problem"]["clients"] = 4
    table["algorithm"] |= {"participants": 4, "local_steps": 1}
    table["variants"] = {name: table["variants"][name] for name in variants}
    return table


@pytest.mark.parametrize(
    ("tried", "step"),
    [
        ([(1, 0.1, 0.2), (2, 0.5, 0.05), (3, 0.4, 0.04)], 3),  # feasible, then least f
        ([(1, 0.1, 0.2), (2, 0.5, 0.06), (3, 0.4, 0.07)], 2),  # none is: least g
        ([(1, np.nan, np.nan), (2, 0.5, 0.9), (3, 0.1, np.inf)], 2),  # the others diverge
        ([(1, 0.3, 0.05), (2, 0.3, 0.01)], 1),  # the first of equals
    ],
)
def test_the_rule(tried, step):
    assert tuning.choose([Tried(*each) for each in tried], 0.05).step == step


def test_every_step_diverges():
    with pytest.raises(fs.InvalidInput, match="diverge with every step size"):
        tuning.choose([Tried(1.0, np.nan, 0.1)], 0.05)


def test_means_are_those_of_single_runs(tmp_path):
    """Every seed with its own division of the data, the last fifth of the rounds."""
    made = config.resolve("x", experiment(["hard"], [0, 3]))
    path = tmp_path / "steps" / "x.json"
    assert tuning.tune(made, [1.0, 0.1], None, path)
    (found,) = json.loads(path.read_text()).values()
    for each in found["tried"]:
        runs = [
            fs.solve(
                fs.problems.neyman_pearson(4, seed),
                fs.FedSGM(
                    each["step"],
                    0.05,
                    participants=4,
                    uplink=fs.TopK(0.1),
                    downlink=fs.TopK(0.1),
                ),
                ROUNDS,
                seed=seed,
            )
            for seed in (0, 3)
        ]
        for name in ("objective", "constraint"):
            mean = np.mean([run.history[name][-ROUNDS // 5 :] for run in runs])
            assert each[name] == pytest.approx(mean, rel=1e-5)
    assert [each["step"] for each in found["tried"]] == [1.0, 0.1]
    # What is done is not done again, and the first seeds may be enough.
    before = path.read_text()
    assert tuning.tune(made, [0.5], None, path)
    assert path.read_text() == before
    assert tuning.tune(made, [0.1], 1, tmp_path / "one.json")
    one = tuning.read(tmp_path / "one.json")["hard"]["tried"][0]
    assert one["objective"] != found["tried"][1]["objective"]


def test_steps_are_put_into_a_configuration():
    table = config.read("fedsgm-figure-7-centralized")
    found = {name: {"step_size": 0.25} for name in table["variants"]}
    made = config.resolve("x", tuning.with_steps(table, found) | {"problem": NEYMAN_PEARSON})
    assert {float(each.step_size) for each in made.cells.algorithms.values()} == {0.25}
    assert "algorithm.step_size" not in table["variants"]["centralized: hard"]


NEYMAN_PEARSON = {"kind": "neyman_pearson", "clients": 4}


def test_a_reproduction_runs_with_the_steps_that_were_chosen(tmp_path, monkeypatch):
    name = "fedsgm-figure-1"
    entry = catalogue.Entry(
        "fedsgm/figure-1",
        "x",
        experiments=[name],
        steps=[1e-4, 0.3],
        columns=["step_size", "objective", "worst"],
    )
    monkeypatch.setattr(reproduce, "find", lambda _: entry)
    both = ["hard", "soft, β = 40"]
    for module in (reproduce, catalogue):
        monkeypatch.setattr(module, "tables", lambda *_: {name: experiment(both, [0])})
    made = reproduce.start("fedsgm/figure-1", out=tmp_path / "out")
    interrupted = list(made.run(interrupted=lambda: True))
    assert [result.status for result in interrupted] == ["interrupted"]
    assert [result.status for result in made.run()] == ["finished"]
    summary = made.finish()
    for row in summary["numbers"][name]:
        assert row["step_size"] == [0.3, 0.0]
        chosen = tuning.read(tmp_path / "out/steps" / f"{name}.json")[row["variant"]]
        assert chosen["step_size"] == 0.3
        assert row["objective"][0] == pytest.approx(chosen["tried"][1]["objective"], rel=1e-5)
    page = (tmp_path / "out" / "page.md").read_text()
    assert "|  | step | f | worst g |" in page
    assert "| 0.3 |" in page
