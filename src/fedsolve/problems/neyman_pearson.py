"""Neyman-Pearson classification on breast-cancer data (FedSGM, section 4 and appendix F).

Keep the loss on the minority class (malignant) below a tolerance, and under that condition make the
loss on the majority class (benign) as small as possible:

    f_j(w) = mean of log(1 + e^{w·x}) over client j's benign samples,
    g_j(w) = mean of log(1 + e^{−w·x}) over its malignant ones.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.data.datasets import kept
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive
from fedsolve.problem.domains import Ball, WholeSpace
from fedsolve.problem.problem import Problem
from fedsolve.problems.losses import logistic
from fedsolve.types import Vector

Rows = dict[str, Float[Array, "samples 30"]]


def neyman_pearson(
    clients: int = 20,
    seed: int = 0,
    batch_size: int | None = None,
    radius: float | None = None,
    level: float | int | None = None,
) -> Problem:
    """Classify breast-cancer samples with the loss on the malignant class below a tolerance.

    The data (569 × 30) come with scikit-learn: 80 % to train, standardised, divided so that every
    client has the same number of samples of each class; the samples left over are not used. The
    other 20 % give the error rates `false_alarm` and `miss` in the history.

    The training data are linearly separable, so without a bound on w the infimum of f is 0 and is
    not attained. `radius` keeps ‖w‖ below it, which makes X compact, as the paper's theory has it.

    A loss is never 0, so that no w satisfies g(w) ≤ 0, and the paper bounds g by the algorithm's
    tolerance instead. With a `level`, g is the loss less the level: then feasible points exist, and
    the theory for g ≤ 0 applies.

    Args:
        clients: The number of clients.
        seed: Seed of the division into training and test data.
        batch_size: The size of minibatches; None for all samples of a client.
        radius: The radius of the ball X around 0; None for no restriction.
        level: The loss on the malignant class at which g is 0; None for 0.

    Returns:
        The problem.

    Raises:
        InvalidInput: If a client would have no malignant sample, or `radius` or `level` is not
            positive.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.neyman_pearson(clients=5)
        >>> problem.n, problem.dimension
        (5, 30)
        >>> {name: rows.shape for name, rows in problem.samples.values.items()}
        {'majority': (5, 57, 30), 'minority': (5, 34, 30)}
    """
    check_count("clients", clients)
    if level is not None:
        check_positive("level", level)
    version = importlib.metadata.version("scikit-learn")
    found = kept(f"breast-cancer-{seed}-{version}", lambda: _split(seed))
    inputs, held_out = found["inputs"], found["held_out"]
    benign, held_out_benign = found["benign"], found["held_out_benign"]
    center, spread = inputs.mean(axis=0), inputs.std(axis=0)
    inputs, held_out = (inputs - center) / spread, (held_out - center) / spread
    classes = {"majority": inputs[benign], "minority": inputs[~benign]}
    fewest = min(map(len, classes.values()))
    if clients > fewest:
        raise InvalidInput(
            f"{clients} clients cannot each have a malignant sample: there are {fewest}."
        )

    def deal(rows: np.ndarray) -> np.ndarray:  # already shuffled by train_test_split
        each = len(rows) // clients
        return rows[: each * clients].reshape(clients, each, -1)

    return Problem(
        objective=majority_loss,
        constraint=minority_loss if level is None else MinorityLossAbove(float(level)),
        clients={name: deal(rows) for name, rows in classes.items()},
        params=np.zeros(inputs.shape[1]),
        domain=WholeSpace() if radius is None else Ball(radius),
        batch_size=batch_size,
        test={"majority": held_out[held_out_benign], "minority": held_out[~held_out_benign]},
        metrics={"false_alarm": false_alarm, "miss": miss},
    )


def _split(seed: int) -> dict[str, np.ndarray]:
    """Divide the data into 80 % to train and 20 % to test, with the same shares of the classes."""
    from sklearn.datasets import load_breast_cancer  # slow to import
    from sklearn.model_selection import train_test_split

    every, is_benign = map(np.asarray, load_breast_cancer(return_X_y=True))
    parts = train_test_split(
        every, is_benign == 1, test_size=0.2, random_state=seed, stratify=is_benign
    )
    names = "inputs", "held_out", "benign", "held_out_benign"
    return dict(zip(names, map(np.asarray, parts), strict=True))


def majority_loss(w: Vector, data: Rows) -> Float[Array, ""]:
    """Compute the mean loss on benign samples."""
    return jnp.mean(logistic(data["majority"] @ w))


def minority_loss(w: Vector, data: Rows) -> Float[Array, ""]:
    """Compute the mean loss on malignant samples."""
    return jnp.mean(logistic(-(data["minority"] @ w)))


@dataclasses.dataclass(frozen=True)
class MinorityLossAbove:
    """The minority's loss less a level.

    Two instances with the same level are equal, so that they share a compiled program.
    """

    level: float

    def __call__(self, w: Vector, data: Rows) -> Float[Array, ""]:
        """Compute the loss less the level."""
        return minority_loss(w, data) - self.level


def false_alarm(w: Vector, test: Rows) -> Float[Array, ""]:
    """Compute the share of benign test samples that are classified as malignant."""
    return jnp.mean(test["majority"] @ w > 0)


def miss(w: Vector, test: Rows) -> Float[Array, ""]:
    """Compute the share of malignant test samples that are classified as benign."""
    return jnp.mean(test["minority"] @ w <= 0)
