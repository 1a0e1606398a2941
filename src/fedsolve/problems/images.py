"""Images classified by networks, and the game of their clients.

Sources: PPBC, section 4; IncentFedAvg, section 5.

    f_i(x) = mean cross-entropy over client i's images
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Int, PyTree

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
from fedsolve.problems.augmentation import augmented
from fedsolve.problems.image_losses import Accuracy, CrossEntropy, Representation
from fedsolve.types import PRNGKey, Vector

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


class ImageClient(Client):
    """A client whose minibatches are augmented, by the key that draws them."""

    def _draw_samples(self, key: PRNGKey | None) -> Samples:
        """Return an augmented minibatch."""
        drawn, problem = super()._draw_samples(key), self._problem
        assert isinstance(problem, Images)
        own = jax.random.fold_in(self.key if key is None else key, 1)
        moved = augmented(own, drawn.values["x"], flip=problem.augment == "crop and flip")
        return Samples({**drawn.values, "x": moved})


class Images(Problem):
    """The problem that `images` returns."""

    augment: str | None = eqx.field(static=True)

    def __init__(self, *given: PyTree, augment: str | None, **options: PyTree):
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
        """Return the same problem over other clients."""
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
    """Classify images of MNIST, CIFAR-10 or Food-101 by a network.

    The history has `test_accuracy`, the accuracy on the test images.

    Args:
        dataset: `"mnist"`, `"cifar10"` or `"food101"` (64×64).
        model: `"mlp"`, `"cnn"` (filters of 3×3), `"small_cnn"` (of 5×5), `"resnet18"` or `"vit"`.
        partition: `"equal"` (equal sizes, classes of each client by Dirichlet(`alpha`)), or those
            of the PPBC paper: `"iid"`, `"two_groups"`, or `"uneven"`, which has ten clients with
            classes by Dirichlet(`alpha`).
        clients: The number of clients.
        hidden: The model's hidden units; None for its default.
        width: The model's channels; None for its default.
        alpha: Concentration of the partition.
        batch_size: The size of minibatches; None for all images of a client.
        samples: How many images to use of each part of the data set, from its start; None for all.
            Food-101, which is sorted by class, is shuffled before.
        augment: Whether minibatches are cropped at random and, if they are not digits, mirrored.
        standardize: Whether pixels are scaled to about −2 to 2 in place of 0 to 1.
        compute: `"bfloat16"` for mixed precision; the types of parameters and messages do not
            change.
        validation: The share of the training images that the server holds (for `BANT`).
        weights: A safetensors file to start from (`fedsolve.models.save`); the last layer is new.
        seed: Seed of the partition and of the initial parameters.

    Returns:
        The problem.

    Raises:
        InvalidInput: If an option is unknown or does not fit the others, or the data set cannot be
            loaded.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.images("mnist", "mlp", hidden=8)  # doctest: +SKIP
        >>> problem.n, problem.dimension  # doctest: +SKIP
        (10, 6370)
    """
    _check_options(model, augment, batch_size, compute)
    sizes = _model_sizes(model, hidden=hidden, width=width)
    train, test, classes = _pictures(dataset, samples)
    train, held = _held_out(train, validation, seed)
    own = partitions.take(train, _parts(train["y"], partition, clients, alpha, seed))
    alike = len({len(part["y"]) for part in own}) == 1
    network = MODELS[model](train["x"].shape[1:], classes, key=jax.random.key(seed), **sizes)
    if weights is not None:
        network = models.load(network, Path(weights), fresh=["head"])
    preprocessing = compute, standardize
    flips = "crop" if dataset == "mnist" else "crop and flip"
    return Images(
        CrossEntropy(*preprocessing),
        jax.tree.map(lambda *leaves: np.stack(leaves), *own) if alike else stack_clients(own),
        network,
        batch_size=batch_size,
        test=test,
        metrics={"test_accuracy": Accuracy(*preprocessing)},
        validation=held,
        representation=Representation(*preprocessing),
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
    """Make the game of the clients of `images`, if both are given the same arguments.

    Its parts are random discovery of the clients' classes, a linear cost with θ_i uniform in
    [0, ‖q_i‖²], and from one sample to all that a client has.

    Args:
        dataset: As for `images`.
        clients: As for `images`.
        alpha: As for `images`.
        regularization: The game's regularisation.
        samples: As for `images`.
        seed: As for `images`.
        cost_seed: Seed of the costs θ_i.

    Returns:
        The game.

    Raises:
        InvalidInput: If an option is unknown, or the data set cannot be loaded.

    Example:
        >>> import fedsolve as fs
        >>> game = fs.problems.discovery_game("mnist", clients=5)  # doctest: +SKIP
    """
    train, _, classes = _pictures(dataset, samples)
    own = _equal_parts(train["y"], clients, alpha, seed)
    Q = class_distributions([train["y"][rows] for rows in own], classes=classes)
    theta = np.random.default_rng(cost_seed).uniform(0, (Q**2).sum(axis=1))
    upper = [len(rows) for rows in own]
    return Game(RandomDiscovery(Q), LinearCost(theta), np.ones(clients), upper, regularization)


def _check_options(model: str, augment: bool, batch_size: int | None, compute: str | None) -> None:
    """Raise for options that are unknown or do not fit each other."""
    if model not in MODELS:
        raise InvalidInput(f"model must be one of {', '.join(MODELS)}, got {model!r}.")
    if compute not in (None, "bfloat16", "float32"):
        raise InvalidInput(f'compute must be "bfloat16" or "float32", got {compute!r}.')
    if augment and batch_size is None:
        raise InvalidInput("augment changes minibatches: give a batch_size.")


def _model_sizes(model: str, **given: int | None) -> dict[str, int]:
    """Return the sizes that are not None; raise for one that the model does not have."""
    sizes = {name: size for name, size in given.items() if size is not None}
    for name, size in sizes.items():
        check_count(name, size)
        if name not in SIZES[model]:
            raise InvalidInput(f"{model} has no {name}; it has {', '.join(SIZES[model])}.")
    return sizes


def _pictures(dataset: str, samples: int | None) -> tuple[Arrays, Arrays, int]:
    """Load training and test images, and the number of classes."""
    if dataset not in DATASETS:
        raise InvalidInput(f"dataset must be one of {', '.join(DATASETS)}, got {dataset!r}.")
    data = load(dataset)
    if samples is not None:
        check_count("samples", samples)

    def shaped(part: Arrays) -> Arrays:
        rows: slice | np.ndarray = slice(samples)
        if dataset == "food101" and samples is not None:
            rows = np.random.default_rng(0).permutation(len(part["y"]))[:samples]
        x = part["x"] if part["x"].ndim == 4 else part["x"][..., None]
        return {"x": x[rows], "y": part["y"][rows].astype(np.uint8)}

    return shaped(data.train), shaped(data.test), len(data.names["y"])


def _held_out(train: Arrays, share: float | int, seed: int) -> tuple[Arrays, Arrays | None]:
    """Divide the training images into the clients' and the server's."""
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
    """Return the indices of each client's images, by the partition of that name."""
    check_count("clients", clients)
    if partition == "equal":
        return _equal_parts(labels, clients, alpha, seed)
    if partition == "iid":
        return partitions.iid(labels, clients, seed)
    if partition == "two_groups":
        return partitions.two_groups(labels, clients, seed)
    if partition != "uneven":
        raise InvalidInput(f"partition must be one of {', '.join(PARTITIONS)}, got {partition!r}.")
    if clients != len(partitions.PERCENT):
        raise InvalidInput(f"The uneven partition has ten sizes for ten clients, not {clients}.")
    return partitions.uneven(labels, alpha=alpha, seed=seed)


def _equal_parts(labels: np.ndarray, clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Return parts of exactly equal size; the samples left over are not used."""
    check_count("clients", clients)
    own = partitions.uneven(labels, np.ones(clients), alpha, seed)
    fewest = min(map(len, own))
    return [rows[:fewest] for rows in own]
