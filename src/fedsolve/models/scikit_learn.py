"""Linear models as fitted estimators of scikit-learn."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from fedsolve.errors import InvalidInput

WEIGHTS = ("weight", "weights", "w", "coef")
BIASES = ("bias", "b", "intercept")
CLASSIFIERS = ("LogisticRegression", "SGDClassifier", "LinearSVC")
REGRESSORS = ("LinearRegression", "Ridge", "SGDRegressor")


def to_sklearn(params: object, estimator: object, classes: object = None) -> Any:
    """Return a scikit-learn estimator that predicts with these parameters.

    Args:
        params: A linear model's parameters, such as `run.params`: a vector of weights, a matrix
            with one row of weights for each output (transpose the W of x @ W), or a tuple, dict or
            Equinox layer of weights and bias (`weight` and `bias`; names may have first parts, as
            in `head.weight`).
        estimator: A `LogisticRegression`, `SGDClassifier`, `LinearSVC`, `LinearRegression`, `Ridge`
            or `SGDRegressor`. It is copied, not changed.
        classes: The labels of the classes in the order of the outputs; by default 0, 1, … A vector
            of weights is for two classes, whose second has the positive scores.

    Returns:
        A fitted estimator: `predict`, `score`, and what else it has that needs only `coef_`,
        `intercept_` and `classes_`. (Probabilities of an `SGDClassifier` of more than two classes
        are of one class against the others, as always there, not those of a softmax.)

    Raises:
        InvalidInput: If the parameters are no linear model's, or do not fit the classes, or if the
            estimator is none of these.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> from sklearn.linear_model import LogisticRegression
        >>> inputs, labels = np.array([[-2.0], [-1.0], [1.0], [2.0]]), np.array([0, 0, 1, 1])
        >>> problem = fs.problems.logistic_regression(inputs, labels, clients=2)
        >>> run = fs.solve(problem, fs.FedAvg(1.0), rounds=20)
        >>> fs.models.to_sklearn(run.params, LogisticRegression()).predict([[-3.0], [3.0]]).tolist()
        [0, 1]
    """
    from sklearn.base import BaseEstimator, clone

    kind = type(estimator).__name__
    if not isinstance(estimator, BaseEstimator) or kind not in CLASSIFIERS + REGRESSORS:
        raise InvalidInput(
            f"estimator must be one of {', '.join(CLASSIFIERS + REGRESSORS)}, got {estimator!r}."
        )
    weights, bias = _weights_and_bias(params)
    found: Any = clone(estimator)
    if kind in REGRESSORS:
        if classes is not None:
            raise InvalidInput(f"A {kind} has no classes.")
        one = np.ndim(weights) == 1 or (kind == "SGDRegressor" and len(weights) == 1)
        found.coef_ = weights.reshape(-1) if one else weights
        found.intercept_ = bias.reshape(-1) if kind == "SGDRegressor" or not one else bias.item()
        if kind == "SGDRegressor" and found.coef_.ndim > 1:
            raise InvalidInput(f"An SGDRegressor has one output, the parameters {len(weights)}.")
    else:
        rows = np.atleast_2d(weights)
        if len(rows) == 2:  # of two scores only the difference matters
            rows, bias = rows[1:] - rows[:1], bias[1:] - bias[:1]
        count = max(len(rows), 2)
        found.classes_ = np.arange(count) if classes is None else np.asarray(classes)
        if found.classes_.shape != (count,) or len(np.unique(found.classes_)) < count:
            raise InvalidInput(
                f"The parameters are of {count} classes; classes must be {count} different labels, "
                f"got {classes!r}."
            )
        order = np.argsort(found.classes_, kind="stable")  # as scikit-learn keeps them
        if count == 2:
            sign = 1 if order[0] == 0 else -1
            rows, bias = sign * rows, sign * bias
        else:
            rows, bias = rows[order], bias[order]
        found.classes_ = found.classes_[order]
        found.coef_, found.intercept_ = rows, bias
    found.n_features_in_ = weights.shape[-1]
    return found


def _weights_and_bias(
    params: PyTree,
) -> tuple[Float[np.ndarray, "*outputs features"], Float[np.ndarray, " outputs"]]:
    """Return a linear model's weights, and its bias for each output; zeros if it has none."""
    if hasattr(params, "shape"):
        parts = {"weight": params}
    elif isinstance(params, tuple | list) and len(params) == 2:
        parts = dict(zip(("weight", "bias"), params, strict=True))
    else:
        arrays = jax.tree.leaves_with_path(eqx.filter(params, eqx.is_array_like))
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in arrays]
        parts = {n.split(".")[-1]: leaf for n, (_, leaf) in zip(names, arrays, strict=True)}
        if len(parts) < len(arrays):
            parts = dict.fromkeys(names)
    weights = [np.asarray(leaf) for name, leaf in parts.items() if name in WEIGHTS]
    biases = [np.asarray(leaf).reshape(-1) for name, leaf in parts.items() if name in BIASES]
    if len(weights) != 1 or len(biases) > 1 or len(weights) + len(biases) < len(parts):
        raise InvalidInput(
            "params must be weights, or weights and bias (weight, bias), of a linear model; they "
            f"have {', '.join(parts) or 'nothing'}."
        )
    outputs = 1 if weights[0].ndim == 1 else len(weights[0])
    bias = biases[0] if biases else np.zeros(outputs, weights[0].dtype)
    if weights[0].ndim not in (1, 2) or len(bias) != outputs:
        raise InvalidInput(
            f"Weights of shape {weights[0].shape} and a bias of shape {bias.shape} are no linear "
            "model: a vector, or a row for each output, and as many biases."
        )
    return weights[0], bias
