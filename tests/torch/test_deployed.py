"""Modules in deployments: the numbers of the simulation, whatever is lost on the way."""

import os
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.experiments import config
from tests.support.examples import needs_data
from tests.support.in_process import Wires, deploy

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fedsolve.torch  # noqa: E402

CLIENTS, SAMPLES, SIZE = 6, 8, 4


def loss(model, data):
    return F.mse_loss(model(data["x"])[:, 0], data["y"])


def normalised(mode, buffers):
    rng = np.random.default_rng(0)
    data = {
        "x": rng.standard_normal((CLIENTS, SAMPLES, SIZE)),
        "y": rng.standard_normal((CLIENTS, SAMPLES)),
    }
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(SIZE, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1)
    ).double()
    return fs.torch.problem(module, loss, data, mode=mode, buffers=buffers)


def fates(site, number):
    """Some answers are lost after the work is done, a site is killed, questions come twice."""
    kinds = {3: "reply lost", 6: "question repeated", 9: "site killed", 14: "question lost"}
    return kinds.get(number, "")


@pytest.mark.parametrize(
    ("mode", "buffers"), [("compiled", "average"), ("compiled", "local"), ("callback", "average")]
)
def test_running_statistics_are_moved_exactly_once(mode, buffers, tmp_path):
    problem, rounds = normalised(mode, buffers), 6
    algorithm = fs.FedAvg(0.1, local_steps=2, uplink=fs.TopK(0.5))
    wires = Wires(problem, algorithm, tmp_path / "sites")
    wires.lose = fates
    run, _ = deploy(problem, algorithm, wires, tmp_path / "server", rounds)
    heard = np.array([np.isin(np.arange(CLIENTS), row) for row in run.history["cohort"]])
    assert 0 < (~heard).sum() < heard.size / 2
    expected = fs.solve(
        problem,
        algorithm,
        rounds,
        precision="float64",
        arrivals=lambda round, exchange, cohort: jnp.asarray(heard)[round, jnp.asarray(cohort)],
    )
    for name, array in expected.params.items():
        np.testing.assert_allclose(run.params[name], array, rtol=0, atol=1e-12, err_msg=name)
    assert run.buffers.keys() == expected.buffers.keys()
    for name, array in expected.buffers.items():
        np.testing.assert_allclose(run.buffers[name], array, rtol=0, atol=1e-12, err_msg=name)
    if buffers == "average":
        assert float(run.buffers["1.num_batches_tracked"]) == 2 * rounds
    # The last evaluation heard everyone; it uses what each client kept, too.
    np.testing.assert_allclose(
        run.history["objective"][-1], expected.history["objective"][-1], rtol=1e-11
    )


TOP = {"kind": "TopK", "fraction": 0.1}
ALGORITHMS = {  # PPBC's clients add up their changes over an epoch, and send them whole
    "FedSGM": {"step_size": 0.1, "participants": 4, "local_steps": 3, "uplink": TOP},
    "PPBC": {"step_size": 0.1, "epoch_length": 2, "local_steps": 2},
    "SCAFFOLD": {"step_size": 0.1, "participants": 4, "local_steps": 3, "uplink": TOP},
}


@pytest.mark.slow
@pytest.mark.xdist_group("flare")
@pytest.mark.filterwarnings("ignore")  # FLARE's own
@needs_data("cifar10")
def test_a_network_on_three_sites_has_the_numbers_of_the_simulation(monkeypatch):
    pytest.importorskip("nvflare")
    from fedsolve.flare.local_federation import deploy_local

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    kind = "tests.support.deployed:cifar10_cnn"
    kinds = {name: {"kind": name, **settings} for name, settings in ALGORITHMS.items()}
    table = {
        "title": "CIFAR-10",
        "problem": {"kind": kind},
        "algorithm": kinds["FedSGM"],
        "run": {"rounds": 6, "evaluate_every": 2, "precision": "float64"},
        "variants": {name: {"algorithm": own} for name, own in kinds.items()},
    }
    experiment = config.resolve("cifar10", table, allowed=[kind])
    deployed, _, status = deploy_local(experiment, 3, lambda news: None)
    assert status == "finished"
    switches = {}
    for name, (problem, algorithm) in experiment.cells.items():
        expected = fs.solve(problem, algorithm, rounds=6, evaluate_every=2, precision="float64")
        (run,) = deployed[name]
        for key, array in expected.params.items():
            np.testing.assert_allclose(run.params[key], array, rtol=0, atol=1e-9, err_msg=key)
        for key, array in expected.buffers.items():
            np.testing.assert_allclose(run.buffers[key], array, rtol=0, atol=1e-9, err_msg=key)
        for column in ("objective", "constraint"):
            np.testing.assert_allclose(run.history[column], expected.history[column], rtol=1e-9)
        assert (run.history["bytes_up"] == expected.history["bytes_up"]).all()
        assert run.history["objective"][-1] < expected.history["objective"][0]
        switches[name] = run.history.get("switch")
    assert switches["FedSGM"].any()  # it followed the worst class
