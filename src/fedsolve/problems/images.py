"""Images classified by networks (PPBC, section 4; IncentFedAvg, section 5), and the game of
clients that have them.

    f_i(x) = mean cross-entropy over client i's images

Images stay bytes in the clients' data and become numbers in the loss. More than `CHUNK` of them are
worked on piece by piece, so that an evaluation does not need the activations of all at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped, UInt8

from fedsolve import models
from fedsolve.data import partitions
from fedsolve.data.datasets import Arrays, load
from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.games import Game, LinearCost, RandomDiscovery, class_distributions
from fedsolve.models import Network
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Samples
from fedsolve.problem.stacking import stack_clients
from fedsolve.types import PRNGKey, Vector

CHUNK = 512  # images
MARGIN = 4  # pixels that a crop may be off
Pictures = dict[str, Shaped[Array, "s ..."]]  # x, y, and a mask if clients differ in size

MODELS: dict[str, Callable[..., Network]] = {
    "mlp": models.MLP,
    "cnn": models.CNN,
    "small_cnn": lambda shape, classes, width=16, hidden=64, *, key: models.CNN(
        shape, classes, width=width, hidden=hidden, side=5, key=key
    ),
    "resnet18": models.ResNet18,
    "vit": models.VisionTransformer,
}
SIZES = {"mlp": ("hidden",), "cnn": ("width", "hidden"), "small_cnn": ("width", "hidden")}
SIZES |= {"resnet18": ("width",), "vit": ("width",)}
PARTITIONS = ("equal", "iid", "two_groups", "uneven")
DATASETS = ("mnist", "cifar10", "food101")


@dataclasses.dataclass(frozen=True)
class Look:
    """How a network sees images: in what type, and centred or not."""

    compute: str | None
    standardize: bool

    def floats(self, network: Network, images: UInt8[Array, "s h w c"]) -> Float[Array, "s h w c"]:
        kind = network.head.weight.dtype
        x = images.astype(kind) / 255
        x = (x - 0.5) / 0.25 if self.standardize else x
        return x if self.compute is None else x.astype(self.compute)

    def scores(self, network: Network, images: UInt8[Array, "s h w c"]) -> Float[Array, "s k"]:
        return network(self.floats(network, images)).astype(network.head.weight.dtype)


class CrossEntropy(Look):
    """The mean over a client's images of minus the logarithm of their own class's share."""

    def __call__(self, network: Network, data: Pictures) -> Float[Array, ""]:
        def losses(images: Any, classes: Any) -> Float[Array, " s"]:
            shares = jax.nn.log_softmax(self.scores(network, images))
            return -jnp.take_along_axis(shares, classes[:, None].astype(int), axis=1)[:, 0]

        return _mean(losses, data)


class Accuracy(Look):
    """The share of images whose class is found."""

    def __call__(self, network: Network, data: Pictures) -> Float[Array, ""]:
        def right(images: Any, classes: Any) -> Float[Array, " s"]:
            scores = self.scores(network, images)
            return (jnp.argmax(scores, axis=1) == classes).astype(scores.dtype)

        return _mean(right, data)


class Representation(Look):
    """What the last layer sees of each image."""

    def __call__(self, network: Network, data: Pictures) -> Float[Array, "s features"]:
        rows = network.represent(self.floats(network, data["x"]))
        return rows.astype(network.head.weight.dtype)


def _mean(each: Callable, data: Pictures) -> Float[Array, ""]:
    """The mean of `each(images, classes)` over the real ones, in pieces if they are many."""
    x, y = data["x"], data["y"]
    if len(x) <= CHUNK:
        values = each(x, y)
    else:

        @jax.checkpoint  # a gradient, too, keeps one piece's activations
        def one(row: tuple[Array, Array]) -> Float[Array, ""]:
            return each(row[0][None], row[1][None])[0]

        values = lax.map(one, (x, y), batch_size=CHUNK)
    if "mask" not in data:
        return jnp.mean(values)
    return jnp.sum(jnp.where(data["mask"], values, 0)) / jnp.sum(data["mask"])


def augmented(
    key: Key[Array, ""], images: UInt8[Array, "s h w c"], flip: bool = True
) -> UInt8[Array, "s h w c"]:
    """Each image moved by up to `MARGIN` pixels, zeros coming in, and half of them mirrored."""
    to_move, to_flip = jax.random.split(key)
    count, height, width, _ = images.shape
    down, right = jax.random.randint(to_move, (2, count, 1), 0, 2 * MARGIN + 1)
    rows, columns = jnp.arange(height)[None], jnp.arange(width)[None]
    if flip:
        mirrored = jax.random.bernoulli(to_flip, shape=(count, 1))
        columns = jnp.where(mirrored, width - 1 - columns, columns)
    rows, columns = down + rows, right + columns
    wide = jnp.pad(images, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)))
    return wide[jnp.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


class ImageClient(Client):
    """A client whose minibatches are augmented, by the key that draws them."""

    def _draw_samples(self, key: Any) -> Samples:
        drawn, problem = super()._draw_samples(key), self._problem
        assert isinstance(problem, Images)
        own = jax.random.fold_in(self.key if key is None else key, 1)
        moved = augmented(own, drawn.values["x"], flip=problem.augment == "crop and flip")
        return Samples({**drawn.values, "x": moved})


class Images(Problem):
    """See `fedsolve.problems.images`."""

    augment: str | None = eqx.field(static=True)

    def __init__(self, *given: Any, augment: str | None, **options: Any):
        super().__init__(*given, **options)
        self.augment = augment

    def client(
        self,
        samples: Samples,
        w: Vector,
        round: Int[Array, ""],
        index: Int[Array, ""],
        key: PRNGKey,
        memory: PyTree = None,
        /,
    ) -> Client:
        """Make a client, of the class that augments minibatches if this problem does."""
        kind = Client if self.augment is None else ImageClient
        return kind(self, samples, w, round, index, key, memory)

    def with_clients(self, clients: PyTree) -> Images:
        same = ("batch_size", "test", "validation", "representation")
        options = {name: getattr(self, name) for name in same} | {"metrics": dict(self.metrics)}
        loss, augment = self.given[0], self.augment
        return Images(loss, clients, self.params, augment=augment, **options)


def images(
    dataset: str = "mnist",
    model: str = "mlp",
    partition: str = "equal",
    clients: int = 10,
    hidden: int | None = None,
    width: int | None = None,
    alpha: float = 0.5,
    batch_size: int | None = 16,
    samples: int | None = None,
    augment: bool = False,
    standardize: bool = False,
    compute: str | None = None,
    validation: float | int = 0.0,
    weights: str | Path | None = None,
    seed: int = 0,
) -> Images:
    """MNIST, CIFAR-10 or Food-101 over clients, classified by a network.

    - `dataset`: `"mnist"`, `"cifar10"` or `"food101"` (64×64); the first `samples` of each of its
      parts, all if None (Food-101, which is sorted by class, is shuffled before that).
    - `model`: `"mlp"`, `"cnn"` (filters of 3×3), `"small_cnn"` (of 5×5), `"resnet18"` or `"vit"`.
      `hidden` units and `width` (channels) are the model's own where they are None.
    - `partition`: `"equal"` (one size, classes of each client by Dirichlet(`alpha`)), or those of
      the PPBC paper: `"iid"`, `"two_groups"`, `"uneven"` (ten clients, Dirichlet(`alpha`)).
    - `augment`: minibatches are cropped at random and, if they are no digits, mirrored.
    - `standardize`: pixels about from −2 to 2 in place of 0 to 1.
    - `compute`: `"bfloat16"` for mixed precision; parameters and what is sent stay as they are.
    - `validation`: that share of the training images stays with the server (for `BANT`).
    - `weights`: a safetensors file to start from (`fedsolve.models.save`); the last layer is new.

    Test images give `test_accuracy`.
    """
    if model not in MODELS:
        raise InvalidInput(f"model must be one of {', '.join(MODELS)}, got {model!r}.")
    if compute not in (None, "bfloat16", "float32"):
        raise InvalidInput(f'compute must be "bfloat16" or "float32", got {compute!r}.')
    if augment and batch_size is None:
        raise InvalidInput("augment changes minibatches: give a batch_size.")
    sizes = {"hidden": hidden, "width": width}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    for name, size in sizes.items():
        check_count(name, size)
        if name not in SIZES[model]:
            raise InvalidInput(f"{model} has no {name}; it has {', '.join(SIZES[model])}.")
    train, test, classes = _pictures(dataset, samples)
    train, held = _held_out(train, validation, seed)
    own = partitions.take(train, _parts(train["y"], partition, clients, alpha, seed))
    alike = len({len(part["y"]) for part in own}) == 1
    network = MODELS[model](train["x"].shape[1:], classes, key=jax.random.key(seed), **sizes)
    if weights is not None:
        network = models.load(network, Path(weights), fresh=["head"])
    look = compute, standardize
    flips = "crop" if dataset == "mnist" else "crop and flip"
    return Images(
        CrossEntropy(*look),
        jax.tree.map(lambda *leaves: np.stack(leaves), *own) if alike else stack_clients(own),
        network,
        batch_size=batch_size,
        test=test,
        metrics={"test_accuracy": Accuracy(*look)},
        validation=held,
        representation=Representation(*look),
        augment=flips if augment else None,
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
    train, _, classes = _pictures(dataset, samples)
    own = _deal(train["y"], clients, alpha, seed)
    Q = class_distributions([train["y"][rows] for rows in own], classes=classes)
    theta = np.random.default_rng(cost_seed).uniform(0, (Q**2).sum(axis=1))
    upper = [len(rows) for rows in own]
    return Game(RandomDiscovery(Q), LinearCost(theta), np.ones(clients), upper, regularization)


def _pictures(dataset: str, samples: int | None) -> tuple[Arrays, Arrays, int]:
    """Training and test images, and how many classes there are."""
    if dataset not in DATASETS:
        raise InvalidInput(f"dataset must be one of {', '.join(DATASETS)}, got {dataset!r}.")
    data = load(dataset)
    if samples is not None:
        check_count("samples", samples)

    def shaped(part: Arrays) -> Arrays:
        rows: Any = slice(samples)
        if dataset == "food101" and samples is not None:
            rows = np.random.default_rng(0).permutation(len(part["y"]))[:samples]
        x = part["x"] if part["x"].ndim == 4 else part["x"][..., None]
        return {"x": x[rows], "y": part["y"][rows].astype(np.uint8)}

    return shaped(data.train), shaped(data.test), len(data.names["y"])


def _held_out(train: Arrays, share: Any, seed: int) -> tuple[Arrays, Arrays | None]:
    """The training images without those that the server holds, and these."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise InvalidInput(f"validation must be a share from 0 to less than 1, got {share!r}.")
    if share == 0:
        return train, None
    order = np.random.default_rng([seed, 1]).permutation(len(train["y"]))
    held = max(round(share * len(order)), 1)
    parts = np.sort(order[held:]), np.sort(order[:held])
    rest, kept = ({name: leaf[rows] for name, leaf in train.items()} for rows in parts)
    return rest, kept


def _parts(
    labels: np.ndarray, partition: str, clients: int, alpha: float, seed: int
) -> list[np.ndarray]:
    check_count("clients", clients)
    if partition == "equal":
        return _deal(labels, clients, alpha, seed)
    if partition == "iid":
        return partitions.iid(labels, clients, seed)
    if partition == "two_groups":
        return partitions.two_groups(labels, clients, seed)
    if partition != "uneven":
        raise InvalidInput(f"partition must be one of {', '.join(PARTITIONS)}, got {partition!r}.")
    if clients != len(partitions.PERCENT):
        raise InvalidInput(f"The uneven partition has ten sizes for ten clients, not {clients}.")
    return partitions.uneven(labels, alpha=alpha, seed=seed)


def _deal(labels: np.ndarray, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Clients of one size: what cannot be dealt evenly is not used."""
    check_count("clients", clients)
    own = partitions.uneven(labels, np.ones(clients), alpha, seed)
    fewest = min(map(len, own))
    return [rows[:fewest] for rows in own]
