"""All local steps of a client in one call, where the objective offers that.

Local steps are a loop in the compiled program, and each asks the objective for a gradient. An
objective whose gradients come from elsewhere (a PyTorch module that runs beside the program) can
offer `local_pass` instead: it gets what the steps start from and follow, and returns where they
lead. What it cannot follow it declines, and the steps are taken one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Int, UInt32

from fedsolve.problem.samples import Samples
from fedsolve.types import Number, PyTree, Vector


class Correction(NamedTuple):
    """What a local step adds to ∇f_j(v): shift + proximity · (v − w)."""

    shift: Vector | None = None
    proximity: Number | None = None


class LocalWork(NamedTuple):
    """What the local steps of a client start from and follow."""

    w: Vector
    samples: Samples  # with the state of the loss
    steps: object  # a number, or passes over the samples
    rows: Callable[[], PyTree]  # the rows of each minibatch; None where all samples are used
    noise: UInt32[Array, "..."]  # the words of a key of this pass
    step_size: Number | None  # of gradient descent; None where there is an optimizer
    correction: Correction
    sigma: Number | None  # 0 to follow the objective, 1 the constraint; None: the objective


class Walked(NamedTuple):
    """Where local steps led."""

    change: Vector  # the pseudo-gradient
    directions: Vector  # the sum of the directions
    state: PyTree


@runtime_checkable
class HasLocalPass(Protocol):
    """An objective that may take all local steps of a client in one call."""

    def local_pass(self, work: LocalWork) -> Walked | None:
        """Take the steps; None to have them taken one by one."""
        ...
