"""Images classified by small networks, and the game of clients that have them (IncentFedAvg,
section 5).

    f_i(x) = mean cross-entropy over client i's images

Clients are of one size; their classes are drawn from Dirichlet(α).
"""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt8

from fedsolve import partitions
from fedsolve.datasets import Arrays, load
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.games import Game, LinearCost, RandomDiscovery, class_distributions
from fedsolve.problem import Problem

Pictures = dict[str, UInt8[Array, "s ..."] | Int[Array, " s"]]


class Dense(eqx.Module):
    """Two layers: pixels, `hidden` rectified units, ten classes."""

    layers: tuple[eqx.nn.Linear, eqx.nn.Linear]

    def __init__(self, shape: tuple[int, ...], hidden: int, key: Key[Array, ""]):
        one, two = jax.random.split(key)
        pixels = int(np.prod(shape))
        self.layers = (
            eqx.nn.Linear(pixels, hidden, key=one),
            eqx.nn.Linear(hidden, 10, key=two),
        )

    def __call__(self, picture: Float[Array, "height width colors"]) -> Float[Array, "10"]:
        first, second = self.layers
        return second(jax.nn.relu(first(jnp.ravel(picture))))


class Convolution(eqx.Module):
    """Two convolutions of 5 × 5 with 16 and 32 channels, each halved, then `hidden` units."""

    convolutions: tuple[eqx.nn.Conv2d, eqx.nn.Conv2d]
    dense: Dense

    def __init__(self, shape: tuple[int, ...], hidden: int, key: Key[Array, ""]):
        one, two, three = jax.random.split(key, 3)
        height, width, colors = shape
        self.convolutions = (
            eqx.nn.Conv2d(colors, 16, 5, padding=2, key=one),
            eqx.nn.Conv2d(16, 32, 5, padding=2, key=two),
        )
        self.dense = Dense((height // 4, width // 4, 32), hidden, three)

    def __call__(self, picture: Float[Array, "height width colors"]) -> Float[Array, "10"]:
        halve = eqx.nn.MaxPool2d(2, 2)
        found = jnp.moveaxis(picture, -1, 0)
        for convolution in self.convolutions:
            found = halve(jax.nn.relu(convolution(found)))
        return self.dense(found)


NETWORKS: dict[str, Callable] = {"dense": Dense, "convolution": Convolution}


def images(
    dataset: str = "mnist",
    network: str = "dense",
    clients: int = 10,
    hidden: int = 64,
    alpha: float = 0.5,
    batch_size: int | None = 16,
    samples: int | None = None,
    seed: int = 0,
) -> Problem:
    """MNIST or CIFAR-10 over clients with different classes, by a dense or convolutional network.

    - `dataset`: `"mnist"` or `"cifar10"`; the first `samples` of its training part, all if None.
    - `network`: `"dense"` (two layers) or `"convolution"` (two of them, then two layers).
    - `alpha`: every client's classes are drawn from Dirichlet(α); all are of one size.

    Test images give `test_accuracy`.
    """
    if network not in NETWORKS:
        raise InvalidInput(f"network must be one of {', '.join(NETWORKS)}, got {network!r}.")
    check_count("hidden", hidden)
    train, test = _pictures(dataset, samples)
    own = _deal(train, clients, alpha, seed)
    return Problem(
        objective=cross_entropy,
        clients={name: np.stack([leaf[rows] for rows in own]) for name, leaf in train.items()},
        params=NETWORKS[network](train["x"].shape[1:], hidden, jax.random.key(seed)),
        batch_size=batch_size,
        test=test,
        metrics={"test_accuracy": accuracy},
    )


def discovery_game(
    dataset: str = "mnist",
    clients: int = 10,
    alpha: float = 0.5,
    regularization: float = 1e-5,
    samples: int | None = None,
    seed: int = 0,
    cost_seed: int = 0,
) -> Game:
    """The game of the clients of `images` (give both the same): random discovery of their classes,
    a linear cost with θ_i uniform in [0, ‖q_i‖²], from one sample to all that a client has."""
    train, _ = _pictures(dataset, samples)
    own = _deal(train, clients, alpha, seed)
    Q = class_distributions([train["y"][rows] for rows in own], classes=10)
    theta = np.random.default_rng(cost_seed).uniform(0, (Q**2).sum(axis=1))
    upper = [len(rows) for rows in own]
    return Game(RandomDiscovery(Q), LinearCost(theta), np.ones(clients), upper, regularization)


def cross_entropy(network: Callable, data: Pictures) -> Float[Array, ""]:
    scores = jax.nn.log_softmax(_scores(network, data))
    return -jnp.mean(jnp.take_along_axis(scores, data["y"][:, None].astype(int), axis=1))


def accuracy(network: Callable, data: Pictures) -> Float[Array, ""]:
    """The share of images whose class is found."""
    return jnp.mean(jnp.argmax(_scores(network, data), axis=1) == data["y"])


def _scores(network: Callable, data: Pictures) -> Float[Array, "s 10"]:
    kind = jax.tree.leaves(eqx.filter(network, eqx.is_inexact_array))[0].dtype
    return jax.vmap(network)(jnp.asarray(data["x"], kind) / 255)


def _pictures(dataset: str, samples: int | None) -> tuple[Arrays, Arrays]:
    if dataset not in ("mnist", "cifar10"):
        raise InvalidInput(f'dataset must be "mnist" or "cifar10", got {dataset!r}.')
    data = load(dataset)
    if samples is not None:
        check_count("samples", samples)

    def shaped(part: Arrays) -> Arrays:
        x = part["x"] if part["x"].ndim == 4 else part["x"][..., None]
        return {"x": x[:samples], "y": part["y"][:samples].astype(np.uint8)}

    return shaped(data.train), shaped(data.test)


def _deal(train: Arrays, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Clients of one size: what cannot be dealt evenly is not used."""
    check_count("clients", clients)
    own = partitions.uneven(train["y"], np.ones(clients), alpha, seed)
    fewest = min(map(len, own))
    return [rows[:fewest] for rows in own]
