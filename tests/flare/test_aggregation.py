"""Robust aggregation over a link: the numbers of the simulation, and jobs that ask for more."""

import json

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.flare.jobs import built
from fedsolve.flare.roster import Roster
from fedsolve.flare.server import serve
from fedsolve.runtimes.placement import numbers_on_device, precision_of
from tests.support import examples
from tests.support.in_process import SITES, Wires


def test_a_deployment_has_the_numbers_of_the_simulation(tmp_path):
    problem, algorithm, rule = examples.least_squares(), fs.FedSGM(0.05, 0.1), fs.Trimmed(0.2)
    wires = Wires(problem, algorithm, tmp_path)
    with precision_of("float64") as dtype:
        tuned = numbers_on_device(algorithm, dtype)
        link = Roster(wires, problem.on_device(dtype), tuned, [].append)
    home = tmp_path / "server"
    home.mkdir()
    given = {"precision": "float64", "aggregation": rule}
    deployed = serve(link, list(SITES), problem, algorithm, 4, 0, home, **given)
    simulated = fs.solve(problem, algorithm, 4, **given)
    plain = fs.solve(problem, algorithm, 4, precision="float64")
    np.testing.assert_allclose(deployed.params, simulated.params, rtol=1e-12)
    for name in ("objective", "constraint", "switch", "bytes_up"):
        np.testing.assert_allclose(deployed.history[name], simulated.history[name], rtol=1e-9)
    assert not np.allclose(deployed.params, plain.params)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("stop", {"kind": "Spent", "messages": 9}, "runs all its rounds; leave out run.stop"),
        ("evaluate_at", "messages", "evaluates by rounds; leave out run.evaluate_at"),
        ("privacy", {"noise": 1.0}, "give run.aggregation=SecureSum too"),
        ("aggregation", {"kind": "SecureSum", "clip": 1.0}, "without noise, for studies"),
    ],
)
def test_jobs_that_a_deployment_cannot_do_are_refused(key, value, sentence):
    config = fs.experiments.read("neyman-pearson")
    config["run"] |= {key: value}
    if key == "aggregation":
        config["run"]["privacy"] = {"noise": 1.0, "evaluation": "outside"}
    with pytest.raises(fs.InvalidInput, match=sentence):
        built(json.dumps(config))


@pytest.mark.parametrize("kind", [fs.Median, fs.SecureSum])
def test_a_job_may_name_an_aggregation(kind):
    config = fs.experiments.read("neyman-pearson")
    config["run"]["aggregation"] = kind.__name__
    assert isinstance(built(json.dumps(config)).options["aggregation"], kind)
