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

Rows = dict[str, Float[Array, "samples 30"]]


def neyman_pearson(
    clients: int = 20,
    seed: int = 0,
    batch_size: int | None = None,
    radius: float | None = None,
    level: float | int | None = None,
) -> Problem:
    """Breast-cancer classification with the loss on the malignant class held below a tolerance.

    The data (569 × 30) come with scikit-learn: 80 % to train, standardised, dealt out so that every
    client has the same number of samples of each class; what cannot be dealt evenly is not used.
    The other 20 % give the error rates `false_alarm` and `miss`.

    The training data are linearly separable, so without a bound on w the infimum of f is 0 and is
    not attained. `radius` keeps ‖w‖ below it, which makes X compact, as the paper's theory has it.

    A loss is never 0, so that no w satisfies g(w) ≤ 0, and the paper bounds g by the algorithm's
    tolerance instead. With a `level`, g is the loss less the level: then feasible points exist, and
    what the theory says about g ≤ 0 has a meaning.
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
    """80 % to train, 20 % held out, with the same shares of the classes."""
    from sklearn.datasets import load_breast_cancer  # slower to import than all of ours
    from sklearn.model_selection import train_test_split

    every, is_benign = map(np.asarray, load_breast_cancer(return_X_y=True))
    parts = train_test_split(
        every, is_benign == 1, test_size=0.2, random_state=seed, stratify=is_benign
    )
    names = "inputs", "held_out", "benign", "held_out_benign"
    return dict(zip(names, map(np.asarray, parts), strict=True))


def majority_loss(w: Float[Array, " d"], data: Rows) -> Float[Array, ""]:
    return jnp.mean(logistic(data["majority"] @ w))


def minority_loss(w: Float[Array, " d"], data: Rows) -> Float[Array, ""]:
    return jnp.mean(logistic(-(data["minority"] @ w)))


@dataclasses.dataclass(frozen=True)
class MinorityLossAbove:
    """The minority's loss less a level. Two with one level are equal: they share a program."""

    level: float

    def __call__(self, w: Float[Array, " d"], data: Rows) -> Float[Array, ""]:
        return minority_loss(w, data) - self.level


def false_alarm(w: Float[Array, " d"], test: Rows) -> Float[Array, ""]:
    """The share of benign test samples called malignant."""
    return jnp.mean(test["majority"] @ w > 0)


def miss(w: Float[Array, " d"], test: Rows) -> Float[Array, ""]:
    """The share of malignant test samples called benign."""
    return jnp.mean(test["minority"] @ w <= 0)
