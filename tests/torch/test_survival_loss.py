"""A Cox loss that loops over patients in Python, as FLamby's does, by callback: the same run."""

import importlib.util
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.problems import survival
from tests.support import examples

torch = pytest.importorskip("torch")


class CoxLoss(torch.nn.Module):
    """The negative partial log-likelihood of scores; truth has events and times."""

    def forward(self, scores, truth):
        rows = sorted(zip(scores[:, 0], truth, strict=True), key=lambda row: -float(row[1][1]))
        loss, seen = scores.sum() * 0, []
        for score, (event, _) in rows:
            seen.append(score)
            if event > 0:
                loss = loss + torch.logsumexp(torch.stack(seen), 0) - score
        return loss / len(rows)


def patients(count, seed):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((count, 4)),
        "time": rng.integers(1, 2 + count // 2, count).astype(float),
        "event": rng.integers(0, 2, count).astype(float),
    }


@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_loss_with_a_loop_over_patients_gives_the_run_of_the_compiled_one(batch_size):
    clients = [patients(n, seed) for seed, n in enumerate((9, 5, 14))]
    start = np.random.default_rng(9).standard_normal(4)
    compiled = fs.Problem(
        survival.cox_loss_in_order, fs.stack_clients(clients), start, batch_size=batch_size
    )
    module = torch.nn.Linear(4, 1, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.as_tensor(start)[None])
    loss = CoxLoss()
    called = fs.torch.problem(
        module,
        lambda model, data: loss(model(data["x"]), torch.stack((data["event"], data["time"]), 1)),
        fs.stack_clients(clients),
        mode="callback",
        batch_size=batch_size,
    )
    algorithm = fs.FedAvg(
        0.05, local_steps=3, weighting="DataSize", server_optimizer=fs.AdaptiveStep("adam", 0.1)
    )
    one = fs.solve(compiled, algorithm, 4, seed=2, precision="float64")
    two = fs.solve(called, algorithm, 4, seed=2, precision="float64")
    np.testing.assert_allclose(one.history["objective"], two.history["objective"], rtol=1e-9)
    np.testing.assert_allclose(two.params["weight"][0], one.params, rtol=1e-8)
    assert abs(one.history["objective"][-1] - one.history["objective"][0]) > 1e-3


FLAMBY = Path(os.environ.get("FLAMBY", "no checkout"), "flamby/datasets/fed_tcga_brca/loss.py")


@pytest.fixture
def flambys_loss(monkeypatch):
    """`BaselineLoss` from a checkout of FLamby, in the folder that $FLAMBY names."""
    package = types.ModuleType("flamby.datasets.fed_tcga_brca")
    monkeypatch.setattr(package, "FedTcgaBrca", None, raising=False)  # what the file imports
    monkeypatch.setattr(package, "Baseline", None, raising=False)
    for name in ("flamby", "flamby.datasets"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    spec = importlib.util.spec_from_file_location("flambys_loss", FLAMBY)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.BaselineLoss()


@pytest.mark.skipif(not FLAMBY.is_file(), reason="$FLAMBY is no checkout of owkin/FLamby")
@examples.needs_data("tcga_brca", "brca.csv")
def test_flambys_own_file_gives_the_run_of_the_compiled_loss(flambys_loss, monkeypatch):
    """Its loss unchanged, on its data and in its settings: two rounds of ten local updates."""
    monkeypatch.setenv("FEDSOLVE_DATA", str(examples.DATA))
    compiled = fs.problems.tcga_brca(seed=42)
    module = torch.nn.Linear(39, 1, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.as_tensor(compiled.params)[None])
    called = fs.torch.problem(
        module,
        lambda model, data: flambys_loss(
            model(data["x"]), torch.stack((data["event"], data["time"]), 1)
        ),
        compiled.samples,
        mode="callback",
        batch_size=8,
    )
    algorithm = fs.SCAFFOLD(0.01, local_steps=10, weighting="DataSize")
    one = fs.solve(compiled, algorithm, 2, seed=42, precision="float64")
    two = fs.solve(called, algorithm, 2, seed=42, precision="float64")
    np.testing.assert_allclose(one.history["objective"], two.history["objective"], rtol=1e-8)
    np.testing.assert_allclose(two.params["weight"][0], one.params, rtol=1e-6, atol=1e-9)
