"""What is said of a run whose values have noise."""

import numpy as np
import pytest

from fedsolve.solving.judgement import judgement


@pytest.mark.parametrize(
    ("g", "noise", "said"),
    [
        (0.0, 0.01, "g = 0 ± 0.01 is feasible (g ≤ 0.1)."),
        (0.2, 0.01, "g = 0.2 ± 0.01 is not feasible (g ≤ 0.1)."),
        (0.09, 0.01, "g = 0.09 ± 0.01 is not known to be feasible (g ≤ 0.1)."),
        (0.11, 0.01, "g = 0.11 ± 0.01 is not known to be feasible (g ≤ 0.1)."),
        (0.0, None, "g follows from sums with noise: whether it is feasible is not known."),
    ],
)
def test_noise_is_not_judged(g, noise, said):
    ones = np.ones(10)
    history = {"round": np.arange(10), "objective": ones, "objective_noise": 0.5 * ones}
    assert judgement(history, 0.1) == "f is known up to noise of ±0.5."
    history["constraint"] = g * ones
    if noise is not None:
        history["constraint_noise"] = noise * ones
    assert judgement(history, 0.1).endswith(said)
