"""Parameters that are not finite end a deployed run with a sentence."""

import pytest

import fedsolve as fs
from fedsolve.flare.journal import read
from tests.support import examples
from tests.support.in_process import Wires, deploy


def test_parameters_that_are_not_finite_end_the_run(tmp_path):
    """Every reply is finite, and w is not; rounds before it stay in the journal."""
    problem, algorithm = examples.least_squares(), fs.FedAvg(1.7e308)
    wires = Wires(problem, algorithm, tmp_path)
    with pytest.raises(fs.InvalidInput, match="Round 1: w is not finite"):
        deploy(problem, algorithm, wires, tmp_path / "server", 3)
    assert read(tmp_path / "server" / "server") == (None, [])
    with pytest.raises(fs.Diverged, match="Round 1: w is not finite"):
        fs.solve(problem, algorithm, 3, precision="float64")
