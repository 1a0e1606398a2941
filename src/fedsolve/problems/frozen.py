"""Images as frozen features, classified by a linear model: convex, and with a known minimum.

    f_m(W) = mean of −log softmax(Wᵀφ(x))_y over client m's images + (λ/2)‖W‖²

φ are the first principal components of the pixels, or the responses of random filters. Each
feature has mean 0 and variance 1 over the training images; a feature that is always 1 is appended.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedsolve.data import partitions
from fedsolve.data.datasets import load
from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_count, check_positive
from fedsolve.problem.problem import Problem
from fedsolve.problem.stacking import stack_clients

DATASETS = ("mnist", "cifar10")
PARTS = ("iid", "two_groups", "uneven")
SIDE = 5  # of a random filter
Images = Float[np.ndarray, "_ _ _ _"]  # images, height, width, channels
Features = Float[np.ndarray, "_ _"]  # images, features


class SoftmaxLoss(eqx.Module):
    """f_m, for λ = `penalty`."""

    penalty: Scalar

    def __call__(self, w: Float[Array, "features classes"], data: PyTree) -> Float[Array, ""]:
        """Compute f_m."""
        scores = data["x"].astype(w.dtype) @ w
        own = jnp.take_along_axis(scores, data["y"][:, None].astype(jnp.int32), axis=1)[:, 0]
        losses = jax.nn.logsumexp(scores, axis=1) - own
        mask = data["mask"]
        mean = jnp.sum(jnp.where(mask, losses, 0)) / jnp.sum(mask)
        return mean + self.penalty / 2 * jnp.sum(w**2)


def accuracy(w: Float[Array, "features classes"], data: PyTree) -> Float[Array, ""]:
    """Compute the share of images that are classified correctly."""
    right = jnp.argmax(data["x"].astype(w.dtype) @ w, axis=1) == data["y"]
    return jnp.sum(right & data["mask"]) / jnp.sum(data["mask"]).astype(w.dtype)


def frozen_features(
    dataset: str = "mnist",
    features: str = "pca",
    partition: str = "two_groups",
    clients: int = 10,
    size: int = 40,
    samples: int | None = None,
    penalty: float | int = 1e-3,
    validation: float | int = 0.02,
    batch_size: int | None = None,
    seed: int = 0,
) -> Problem:
    """Classify images of MNIST or CIFAR-10 by a linear model on features that are not trained.

    The problem is strongly convex. `fs.theory.reference.minimiser` finds its minimum.

    Args:
        dataset: `"mnist"` or `"cifar10"`.
        features: `"pca"`, the first `size` principal components of the pixels; or
            `"convolutions"`, the mean response in each quarter of the image to `size` random
            filters.
        partition: Those of the PPBC paper: `"iid"` (distr-1), `"two_groups"` (distr-2) or
            `"uneven"` (distr-3).
        clients: The number of clients.
        size: The number of components, or of filters.
        samples: How many training images to use, from the start of the data set; None for all.
            As many test images at most.
        penalty: λ.
        validation: The share of the training images that the server holds (for `BANT`).
        batch_size: The size of minibatches; None for all images of a client.
        seed: Seed of the partition. Features do not depend on it.

    Returns:
        The problem. Its history has `test_accuracy`.

    Raises:
        InvalidInput: If an option is unknown, or the data set cannot be loaded.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.frozen_features("mnist", samples=5000)  # doctest: +SKIP
        >>> problem.n, problem.dimension  # doctest: +SKIP
        (10, 410)
    """
    for name, value, known in (
        ("dataset", dataset, DATASETS),
        ("features", features, tuple(EXTRACTORS)),
        ("partition", partition, PARTS),
    ):
        if value not in known:
            raise InvalidInput(f"{name} must be one of {', '.join(known)}, got {value!r}.")
    check_count("size", size)
    if samples is not None:
        check_count("samples", samples)
    check_positive("penalty", penalty, zero=True)
    if not 0 <= validation < 1:
        raise InvalidInput(f"validation must be from 0 to less than 1, got {validation!r}.")
    train, test, labels, classes = _extracted(dataset, features, size, samples)
    rng = np.random.default_rng([seed, 1])
    order, held = rng.permutation(len(train)), round(validation * len(train))
    rest, kept = np.sort(order[held:]), np.sort(order[:held])

    def rows(x: Features, y: np.ndarray, chosen: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": x[chosen], "y": y[chosen]}

    own = rows(train, labels[0], rest)
    parts = _parts(own["y"], partition, clients, seed)
    everything = np.arange(len(test))
    return Problem(
        objective=SoftmaxLoss(float(penalty)),
        clients=stack_clients(partitions.take(own, parts)),
        params=np.zeros((train.shape[1], classes)),
        batch_size=batch_size,
        test=_masked(rows(test, labels[1], everything)),
        metrics={"test_accuracy": accuracy},
        validation=_masked(rows(train, labels[0], kept)) if held else None,
    )


@functools.lru_cache(maxsize=2)  # the problems of several seeds and partitions share it
def _extracted(
    dataset: str, features: str, size: int, samples: int | None
) -> tuple[Features, Features, list[np.ndarray], int]:
    """Return the features of training and test images, their labels, and the number of classes."""
    data = load(dataset)
    train, test = (_pixels(part["x"][:samples]) for part in (data.train, data.test))
    labels = [part["y"][:samples].astype(np.uint8) for part in (data.train, data.test)]
    return *_standardised(*EXTRACTORS[features](train, test, size)), labels, len(data.names["y"])


def _parts(labels: np.ndarray, partition: str, clients: int, seed: int) -> partitions.Parts:
    """Return the indices of each client's images."""
    if partition == "uneven":
        if clients != len(partitions.PERCENT):
            raise InvalidInput(
                f"The uneven partition has ten sizes for ten clients, not {clients}."
            )
        return partitions.uneven(labels, seed=seed)
    make = partitions.iid if partition == "iid" else partitions.two_groups
    return make(labels, clients, seed=seed)


def _masked(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return data | {"mask": np.ones(len(data["y"]), bool)}


def _pixels(x: np.ndarray) -> Images:
    """Return images as numbers from 0 to 1, with an axis of channels."""
    x = x if x.ndim == 4 else x[..., None]
    return x.astype(np.float32) / 255


def _components(train: Images, test: Images, size: int) -> tuple[Features, Features]:
    """Project on the first principal components of the training images."""
    flat, other = (x.reshape(len(x), -1) for x in (train, test))
    center = flat.mean(axis=0)
    flat, other = flat - center, other - center
    covariance = flat.T @ flat / len(flat)
    if size > len(covariance):
        raise InvalidInput(f"size is {size}, but images have only {len(covariance)} pixels.")
    _, vectors = np.linalg.eigh(covariance.astype(np.float64))
    leading = vectors[:, ::-1][:, :size]
    return flat @ leading, other @ leading


def _responses(train: Images, test: Images, size: int) -> tuple[Features, Features]:
    """Return mean responses of random filters, rectified, in the four quarters of an image."""
    filters = np.random.default_rng(0).standard_normal((SIDE, SIDE, train.shape[-1], size))
    filters = jnp.asarray(filters - filters.mean(axis=(0, 1, 2)), jnp.float32)

    @jax.jit
    def respond(x: Array) -> Array:
        seen = jax.lax.conv_general_dilated(
            x, filters, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        seen = jax.nn.relu(seen)
        half = seen.shape[1] // 2
        quarters = [seen[:, a, b].mean(axis=(1, 2)) for a in _halves(half) for b in _halves(half)]
        return jnp.concatenate(quarters, axis=1)

    def all_of(x: Images) -> Features:
        blocks = [x[i : i + 1000] for i in range(0, len(x), 1000)]
        return np.concatenate([np.asarray(respond(block)) for block in blocks])

    return all_of(train), all_of(test)


def _halves(half: int) -> tuple[slice, slice]:
    return slice(None, half), slice(half, None)


def _standardised(train: Features, test: Features) -> tuple[Features, Features]:
    """Scale features to mean 0 and variance 1 on the training images; append a 1."""
    center, scale = train.mean(axis=0), train.std(axis=0)
    scale = np.where(scale > 0, scale, 1)

    def scaled(x: Features) -> Features:
        return np.hstack([(x - center) / scale, np.ones((len(x), 1))]).astype(np.float32)

    return scaled(train), scaled(test)


EXTRACTORS: dict[str, Callable[[Images, Images, int], tuple[Features, Features]]] = {
    "pca": _components,
    "convolutions": _responses,
}
