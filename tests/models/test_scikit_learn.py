"""Exported estimators predict what the trained linear models do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    Ridge,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import LinearSVC

import fedsolve as fs


@pytest.fixture(scope="module")
def points():
    return np.random.default_rng(1).standard_normal((200, 4))


@pytest.fixture(scope="module")
def binary(points):
    labels = (points @ [1.0, -2.0, 0.5, 0.0] > 0.2).astype(int)
    problem = fs.problems.logistic_regression(points, labels, clients=4)
    return fs.solve(problem, fs.FedAvg(1.0, local_steps=3), rounds=30).params


def test_logistic_regression(points, binary):
    scores = points @ binary
    for estimator in (LogisticRegression(), SGDClassifier(loss="log_loss"), LinearSVC()):
        found = fs.models.to_sklearn(binary, estimator)
        assert not hasattr(estimator, "coef_")
        np.testing.assert_array_equal(found.predict(points), scores > 0)
        np.testing.assert_allclose(found.decision_function(points), scores, rtol=1e-6)
        if not isinstance(estimator, LinearSVC):
            chances = np.asarray(jax.nn.sigmoid(jnp.asarray(scores)))
            np.testing.assert_allclose(found.predict_proba(points)[:, 1], chances, rtol=1e-5)
    labelled = fs.models.to_sklearn(binary, LogisticRegression(), classes=["no", "yes"])
    assert labelled.predict(points).tolist() == ["yes" if s > 0 else "no" for s in scores]
    turned = fs.models.to_sklearn(binary, LogisticRegression(), classes=["yes", "no"])
    assert turned.classes_.tolist() == ["no", "yes"]
    assert turned.predict(points).tolist() == ["no" if s > 0 else "yes" for s in scores]


def test_linear_regression(points):
    problem = fs.problems.linear_regression(clients=4, size=4)
    w = fs.solve(problem, fs.FedAvg(0.05), rounds=20).params
    for estimator in (LinearRegression(), Ridge(), SGDRegressor()):
        found = fs.models.to_sklearn(w, estimator)
        np.testing.assert_allclose(found.predict(points), points @ w, rtol=1e-5, atol=1e-6)
    layer = {"out.weight": np.arange(8.0).reshape(2, 4), "out.bias": np.array([1.0, -1.0])}
    found = fs.models.to_sklearn(layer, LinearRegression())
    expected = points @ layer["out.weight"].T + layer["out.bias"]
    np.testing.assert_allclose(found.predict(points), expected, rtol=1e-6)


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_layers_with_a_bias(points, outputs):
    layer = eqx.nn.Linear(4, outputs, key=jax.random.key(0))
    scores = np.asarray(jax.vmap(layer)(jnp.asarray(points)))
    if outputs == 1:
        scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
    shares = np.asarray(jax.nn.softmax(scores))
    for params in (
        layer,
        (layer.weight, layer.bias),
        {"weight": np.asarray(layer.weight), "bias": np.asarray(layer.bias)},
    ):
        found = fs.models.to_sklearn(params, LogisticRegression())
        np.testing.assert_array_equal(found.predict(points), np.argmax(scores, axis=1))
        np.testing.assert_allclose(found.predict_proba(points), shares, rtol=1e-4, atol=1e-6)
    names = ["c", "a", "b"][: max(outputs, 2)]
    found = fs.models.to_sklearn(layer, LogisticRegression(), classes=names)
    assert found.predict(points).tolist() == [names[i] for i in np.argmax(scores, axis=1)]


@pytest.mark.parametrize(
    ("params", "estimator", "classes", "said"),
    [
        (np.ones(3), KNeighborsClassifier(), None, "estimator must be one of"),
        (np.ones(3), LogisticRegression, None, "estimator must be one of"),
        (np.ones(3), LinearRegression(), [0, 1], "has no classes"),
        (np.ones((2, 3)), SGDRegressor(), None, "has one output, the parameters 2"),
        (np.ones((3, 2)), LogisticRegression(), [0, 1], "of 3 classes"),
        (np.ones(3), LogisticRegression(), [1, 1], "2 different labels"),
        ({"first.weight": np.ones((2, 3)), "head.weight": np.ones((1, 2))}, Ridge(), None, "they"),
        ({"scale": np.ones(3)}, Ridge(), None, "they have scale"),
        (np.ones((1, 2, 3)), Ridge(), None, "are no linear model"),
        ((np.ones((2, 3)), np.ones(3)), Ridge(), None, "are no linear model"),
    ],
)
def test_what_is_no_linear_model_is_refused(params, estimator, classes, said):
    with pytest.raises(fs.InvalidInput, match=said):
        fs.models.to_sklearn(params, estimator, classes)
