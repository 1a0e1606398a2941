"""Every runtime computes what is recorded in `record.json`; `record.py` writes it."""

import json

import numpy as np
import pytest

from tests.support import record
from tests.support.conformance import KINDS

RECORD = json.loads(record.FILE.read_text())
EXACT = record.same_machine(RECORD["environment"])


def is_quick(name):
    """The other runtimes are compared with the compiled one in the conformance tests, too."""
    return name.partition(": ")[0] in ("compiled", "sweep", "clock", "game")


def each_case():
    """A case's group is its algorithm's, whose other tests compile some of the same programs."""
    for name in RECORD["cases"]:
        runtime, _, algorithm = name.partition(": ")
        marks = [pytest.mark.xdist_group(algorithm or name)]
        marks += [] if is_quick(name) else [pytest.mark.slow]
        if runtime != "sharded":
            yield pytest.param(name, id=name, marks=marks)


def test_every_case_is_recorded():
    assert RECORD["cases"].keys() == record.cases().keys()


SIMULATED = ("blocks", "debug", "streamed", "sharded")  # of a link, other answers arrive


@pytest.mark.parametrize("name", [n for n in RECORD["cases"] if n.startswith(SIMULATED)])
def test_what_is_recorded_of_the_runtimes_agrees(name):
    """Or a record would keep what a runtime computes in too few digits."""
    _, _, algorithm = name.partition(": ")
    reference = RECORD["cases"][f"compiled: {algorithm}"]["values"]["params/0"]
    found = RECORD["cases"][name]["values"]["params/0"]
    np.testing.assert_allclose(found, reference, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", [*each_case()])
def test_a_run_gives_the_recorded_numbers(name):
    found = record.here([name])[name]
    assert not record.differences(name, RECORD["cases"][name], found, EXACT)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(
            [f"sharded: {name}" for name in KINDS], id="one of each kind", marks=pytest.mark.slow
        ),
        pytest.param(
            [name for name in RECORD["cases"] if name.startswith("sharded")],
            id="all",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_over_two_devices_gives_the_recorded_numbers(names):
    for name, found in record.here(names).items():
        assert not record.differences(name, RECORD["cases"][name], found, EXACT)
