"""Problems with known optima for the tests of this folder."""

import pytest

import fedsolve as fs
from tests.support.logistic import random_problem


@pytest.fixture(scope="session")
def problems():
    return [(p, fs.theory.optimum(p, 1e-7)) for p in map(random_problem, range(25))]
