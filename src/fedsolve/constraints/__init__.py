"""Constraints by name, with exact rates for reports and smooth surrogates for training."""

from fedsolve.constraints.named import (
    cvar,
    demographic_parity,
    equal_opportunity,
    equalized_odds,
    false_positive_rate,
    from_table,
    group_loss,
    sensitivity,
    specificity,
)
from fedsolve.constraints.sample_means import Cell, Claim, SampleMeans, Sums
from fedsolve.constraints.surrogates import Hinge, Sigmoid

__all__ = [
    "Cell",
    "Claim",
    "Hinge",
    "SampleMeans",
    "Sigmoid",
    "Sums",
    "cvar",
    "demographic_parity",
    "equal_opportunity",
    "equalized_odds",
    "false_positive_rate",
    "from_table",
    "group_loss",
    "sensitivity",
    "specificity",
]
