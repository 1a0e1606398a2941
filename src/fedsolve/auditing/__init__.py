"""Audits: what held-out data say about a model's constraints, with confidence bounds."""

from fedsolve.auditing.audit import Audit, Verdict, audit, judge
from fedsolve.auditing.bounds import (
    clopper_pearson_lower,
    clopper_pearson_upper,
    empirical_bernstein,
)
from fedsolve.auditing.counting import Tally, count

__all__ = [
    "Audit",
    "Tally",
    "Verdict",
    "audit",
    "clopper_pearson_lower",
    "clopper_pearson_upper",
    "count",
    "empirical_bernstein",
    "judge",
]
