"""What earlier versions left on machines: kits that name classes, and journals."""

import importlib

import pytest

import fedsolve as fs
from fedsolve.flare.journal import Journal, read
from fedsolve.storage.arrays import decode, parts
from tests.support import examples
from tests.support.in_process import Wires, deploy

NAMES_IN_KITS = (
    "fedsolve.flare.jobs.Coordinator",
    "fedsolve.flare.jobs.Site",
    "fedsolve.flare.launcher.TolerantLauncher",
)


@pytest.mark.parametrize("path", NAMES_IN_KITS)
def test_classes_that_old_kits_name_are_there(path):
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), name), type)


def test_a_journal_of_another_version_is_named(tmp_path):
    """Its state has other arrays: it is refused with a sentence, and stays as it is."""
    problem, algorithm = examples.least_squares(), fs.FedSGM(0.05, 0.1, participants=3)
    wires = Wires(problem, algorithm, tmp_path)
    deploy(problem, algorithm, wires, tmp_path / "server", 2)
    folder = tmp_path / "server" / "server"
    head, arrays = decode(read(folder)[0], None)
    names = sorted(arrays, key=lambda name: (name.split(".")[0], int(name.split(".")[-1])))
    groups = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(arrays[name])
    groups["state"] = groups["state"][:-1]  # one array fewer, as in version 0.1
    journal = Journal(folder)
    journal.load()
    journal.restart(parts(head, groups))
    before = read(folder)[0]
    with pytest.raises(fs.InvalidInput, match="another run or another version"):
        deploy(problem, algorithm, wires, tmp_path / "server", 4)
    assert read(folder)[0] == before
