"""All local steps of a client in one call, where the objective offers that.

Local steps are a loop in the compiled program, and each asks the objective for a gradient. An
objective that is computed elsewhere, such as a PyTorch module, can offer `local_pass` instead: it
gets what the steps start from and follow, and returns where they lead. What it cannot follow it
declines by None, and the steps are taken one by one; or it raises, if it has no single steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Key

from fedsolve.fields import Scalar
from fedsolve.problem.samples import Samples
from fedsolve.types import Personal, PRNGKey, PyTree, Vector


class Follows(NamedTuple):
    """What the direction of a local step is: ∇f_j(v) + shift + proximity · (v − w).

    With `sigma` it is (1 − σ)∇f_j(v) + σ∇g_j(v).
    """

    shift: Vector | None = None
    proximity: Scalar | None = None
    sigma: Scalar | None = None


class Batches(NamedTuple):
    """The minibatches of local steps.

    Args:
        steps: The number of steps; None where the steps are passes over the samples.
        epochs: The number of passes.
        size: The number of samples of a full minibatch in a pass.
        drop_last: Whether a pass leaves out a last minibatch that is not full.
        rows: For steps, the rows of each step's minibatch, in the structure of the data; None for
            all samples. For passes, the order of the rows in each pass, those of padding last.
        keys: The key of each step's noise.
    """

    steps: int | None
    epochs: int
    size: int
    drop_last: bool
    rows: PyTree
    keys: Key[Array, " most"]


class LocalWork(NamedTuple):
    """What the local steps of a client start from and follow.

    Args:
        w: Where they start.
        params: The same in the structure of the parameters, with those that are not trained.
        samples: The client's samples, with the state of the loss.
        batches: Function that returns the minibatches.
        key: A key that no step has.
        plain: Whether the steps are one plain step, so that the algorithm leaves them to the pass.
        step_size: The step size of gradient descent; None where there is an optimizer.
        follows: The direction of a step; None for one that has no name here.
        ravel: Function that returns the trained parameters, or those of a kind, as a vector.
        trained: Names of the shared parameters that are trained; None for all.
        has_personal: Whether the client has personal parameters, which move with the others.
    """

    w: Vector
    params: PyTree
    samples: Samples
    batches: Callable[[], Batches]
    key: PRNGKey
    plain: bool
    step_size: Scalar | None
    follows: Follows | None
    ravel: Callable[..., Vector]
    trained: tuple[str, ...] | None
    has_personal: bool


class Walked(NamedTuple):
    """Where local steps led.

    Args:
        change: The pseudo-gradient.
        directions: The sum of the directions.
        state: The next state.
        own: The negated change of the personal parameters; None if there are none.
    """

    change: Vector
    directions: Vector
    state: PyTree
    own: Personal | None = None


@runtime_checkable
class HasLocalPass(Protocol):
    """An objective that takes all local steps of a client in one call."""

    trains_itself: ClassVar[bool]  # whether it has no single steps

    def local_pass(self, work: LocalWork) -> Walked | None:
        """Take the steps; None to have them taken one by one."""
        ...
