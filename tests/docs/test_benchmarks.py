"""Every script in benchmarks/ runs to its end with `--tiny`, and prints what it measures."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.support import examples
from tests.support.documents import ROOT

BENCHMARKS = ROOT / "benchmarks"

RUNS = {  # by the command: a text that it prints; None if it only writes a file
    "adaptive_tolerance.py": "soft  0.1   0.99",
    "attacks.py": "it was not executed",
    "cartpole.py": "Gymnasium, one environment",
    "cartpole_pictures.py": "Written to cartpole-sensitivity.png",
    "cartpole_sensitivity.py out.csv 3 1 few": "2 settings × 1",
    "choose.py": "| FedADMM, k_0 = 5 |",
    "cifar_table.py": "FedAvg + PoC, seed 0",
    "cluster/job.py --rounds 3": "1 processes",
    "constrained.py neyman-pearson": "| Safe-EF, Top-K 0.1 |",
    "costs.py": "| IncentFedAvg |",
    "deployment.py": "state as large as w: bare",
    "exact_sums.py": "| 20 | 100 |",
    "experiment.py neyman-pearson out.csv": " s\n",
    "fedadmm_scale.py": "until the code's rule",
    "fedadmm_scale.py blocks": "as chosen",
    "fedadmm_scale.py sparse 4": "until the code's rule",
    "fedadmm_scale.py rounds dense 8": "one more",
    "fedadmm_steps.py": "| k_0 = 1: FedSim |",
    "fuzz_wire.py": "200 inputs in",
    "fuzz_wire.py --questions": "200 inputs in",
    "games.py": "| Pigou's prices |",
    "gateway.py": "median ms a round",
    "liars.py": "| collusion |",
    "limits.py FedSGM MOON --out out.json": "| FedSGM |",
    "million.py": "clients that have a state",
    "mutants.py storage/atomic.py": "killed, ",
    "neyman_pearson.py": "NumPy transcription",
    "payments.py --generated": "| best prices |",
    "peers/run.py Fedsolve": "| Fedsolve | ",
    "peers/run.py --work cifar10 --ours": "| Fedsolve, nn.Module | ",
    "peers/run.py --work mnist Fedsolve": "| Fedsolve | ",
    "peers/run.py --work resnet": "| PyTorch loop | ",
    "peers/run.py --work torch": "| Fedsolve, callback | ",
    "privacy.py": "| FedAvg, everyone | inf |",
    "recorded.py fedsgm/table-1 {docs}/results/fedsgm-table-1.csv --command x --machine y": (
        "Written to reproduced"
    ),
    "scaling.py": "| strong | 1 |",
    "secure_sum.py": "| 16 | 100 kB |",
    "torch_modules.py": "LSTM",
}
DATA = {"cifar_table.py": "mnist", "--work mnist": "mnist", "--work cifar10": "cifar10"}
NEEDS = {
    "privacy.py": "dp_accounting",
    "secure_sum.py": "cryptography",
    "cartpole.py": "gymnasium",
    "deployment.py": "nvflare",
    "fuzz_wire.py": "nvflare",
    "gateway.py": "nvflare",
    "torch_modules.py": "torch",
    "peers/run.py --work cifar10": "torch",
    "peers/run.py --work resnet": "torch",
    "peers/run.py --work torch": "torch",
}
ELSEWHERE = {
    "batched.py": "the others import it",
    "cluster/ray_job.py": "it needs Ray",
    "peers/bare_scan.py": "peers/run.py starts it",
    "peers/cifar_ours.py": "peers/run.py starts it",
    "peers/modules.py": "the others import it",
    "peers/ours.py": "peers/run.py starts it",
    "peers/rounds.py": "the others import it",
    "peers/torch_by_hand.py": "it has an environment of its own",
    "peers/torch_loop.py": "peers/run.py starts it",
    "peers/torch_ours.py": "peers/run.py starts it",
    "peers/work.py": "the others import it",
    "tiny.py": "the others import it",
}


def test_every_script_is_run():
    found = {str(path.relative_to(BENCHMARKS)) for path in BENCHMARKS.rglob("*.py")}
    own = {name for name in found if not name.endswith("_peer.py")}  # environments of their own
    assert own - {command.split()[0] for command in RUNS} == {*ELSEWHERE}


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_the_script_runs_to_its_end(command, tmp_path):
    for part, package in NEEDS.items():
        if command.startswith(part) and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for part, name in DATA.items():
        if part in command and not (examples.DATA / name / f"{name}.npz").is_file():
            pytest.skip(f"the data set {name} is not here")
    script, *words = command.format(docs=ROOT / "docs").split()
    if not script.startswith(("cluster", "recorded")):  # those have no small setting
        words.append("--tiny")
    before = kept()
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "FEDSOLVE_DATA": str(examples.DATA)}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *words],
        env=os.environ | home,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert RUNS[command] in done.stdout, done.stdout[-3000:]
    assert kept() == before, "a tiny run must not write into the repository"


def kept():
    """When the files that full runs write were last written."""
    docs = ROOT / "docs"
    written = [docs / "limits.md", *docs.glob("pictures/*"), *docs.glob("results/**/*.*")]
    return {path: path.stat().st_mtime_ns for path in written}
