"""Linear and logistic regression as in FedADMM's experiments (Zhou and Li, section 5.1).

Example 5.1: f_i(w) = (1/2d_i) Σ (⟨a, w⟩ − b)², a third of all samples (a, b) from each of three
distributions, mixed and divided among clients of 50 to 150 samples.

Example 5.2: f_i(w) = (1/d_i) Σ (log(1 + e^{⟨a, w⟩}) − b⟨a, w⟩) + λ/2 ‖w‖².
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, check_positive
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Leaf
from fedsolve.problems.losses import logistic as softplus
from fedsolve.types import Vector

Rows = dict[str, PyTree]  # inputs, and targets or labels, and a mask


def linear_regression(
    clients: int = 100,
    size: int = 100,
    smallest: int = 50,
    largest: int = 150,
    seed: int = 0,
    batch_size: int | None = None,
    variant: str = "paper",
) -> Problem:
    """Fit least squares on samples from three distributions (Example 5.1).

    d_i is uniform in [`smallest`, `largest`] and d = Σ d_i. Of all samples (a, b) ⌈d/3⌉ are
    standard normal, ⌈d/3⌉ are Student-t with 5 degrees of freedom, and the others are uniform in
    [−5, 5]; then they are shuffled and divided. Data are float32, padded to `largest` samples, so
    that all instances have the same shapes. In the authors' released program only ⌈m/3⌉ samples
    are Student-t and ⌈m/3⌉ uniform, for m clients, and the others are normal.

    Args:
        clients: The number of clients.
        size: The number of parameters.
        smallest: The least number of samples of a client.
        largest: The largest number of samples of a client.
        seed: Seed of the data.
        batch_size: The size of minibatches; None for all samples of a client.
        variant: `"paper"`, or `"released"` for the data of the authors' program.

    Returns:
        The problem.

    Raises:
        InvalidInput: If a count is not positive, `largest` is less than `smallest`, or `variant` is
            not known.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=3, size=2, smallest=4, largest=6)
        >>> problem.n, problem.dimension, problem.samples.values["inputs"].shape
        (3, 2, (3, 6, 2))
    """
    for name, count in (("clients", clients), ("size", size), ("smallest", smallest)):
        check_count(name, count)
    if largest < smallest:
        raise InvalidInput(f"largest must be at least smallest ({smallest}), got {largest}.")
    rng = np.random.default_rng(seed)
    sizes = rng.integers(smallest, largest + 1, clients)
    total = int(sizes.sum())
    third = -(-total // 3)
    amounts = [third, third, total - 2 * third]
    if released(variant):
        few = -(-clients // 3)
        amounts = [total - 2 * few, few, few]
    # The distributions are shuffled, and each sample is drawn at its place: no second copy.
    kinds = rng.permutation(np.repeat([0, 1, 2], amounts))
    inputs = _aligned((clients, largest, size))
    targets = np.zeros((clients, largest), np.float32)
    for client, own in enumerate(np.split(kinds, np.cumsum(sizes)[:-1])):
        rows = np.empty((len(own), size + 1), np.float32)
        for kind, draw in enumerate((_normal, _student, _uniform)):
            here = own == kind
            rows[here] = draw(rng, (int(here.sum()), size + 1))
        inputs[client, : len(own)], targets[client, : len(own)] = rows[:, :-1], rows[:, -1]
    mask = np.arange(largest) < sizes[:, None]
    return Problem(
        objective=squared_loss,
        clients={"inputs": jnp.from_dlpack(inputs), "targets": targets, "mask": mask},
        params=np.zeros(size),
        batch_size=batch_size,
    )


def logistic(
    clients: int = 100,
    regularisation: float = 0.001,
    seed: int = 0,
    batch_size: int | None = None,
    unit_columns: bool | None = None,
    split: str = "random",
    variant: str = "paper",
) -> Problem:
    """Fit ℓ2-regularised logistic regression on QSAR oral toxicity (Example 5.2).

    The data are 8992 molecules of 1024 bits, shuffled and cut at random points. The authors'
    released program scales every column to length 1, which the paper does not mention, and has
    λ/(2 d_i) ‖w‖² in place of λ/2 ‖w‖².

    Args:
        clients: The number of clients.
        regularisation: λ.
        seed: Seed of the division.
        batch_size: The size of minibatches; None for all samples of a client.
        unit_columns: Whether every column is scaled to length 1; None for the variant's choice.
        split: `"random"` or `"equal"`, see `logistic_regression`.
        variant: `"paper"`, or `"released"` for the problem of the authors' program.

    Returns:
        The problem.

    Raises:
        InvalidInput: If the data set cannot be loaded, there are more clients than samples, or
            `split` or `variant` is not known.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.logistic(clients=10)  # doctest: +SKIP
        >>> problem.dimension  # doctest: +SKIP
        1024
    """
    from fedsolve.data.datasets import load

    found = load("qsar_oral_toxicity").train
    inputs = np.asarray(found["x"], np.float32)
    if released(variant) if unit_columns is None else unit_columns:
        lengths = np.linalg.norm(inputs, axis=0)
        inputs = inputs / np.where(lengths > 0, lengths, 1)
    options = {"batch_size": batch_size, "split": split, "variant": variant}
    return logistic_regression(inputs, found["y"], clients, regularisation, seed, **options)


def logistic_regression(
    inputs: np.ndarray,
    labels: np.ndarray,
    clients: int,
    regularisation: float = 0.001,
    seed: int = 0,
    batch_size: int | None = None,
    split: str = "equal",
    variant: str = "paper",
) -> Problem:
    """Fit ℓ2-regularised logistic regression on any data (Example 5.2).

    Samples are shuffled and divided: in parts that differ by at most one sample, or at random
    points, as in the experiments of FedADMM's authors.

    Args:
        inputs: One row for each sample.
        labels: 0 or 1 for each sample.
        clients: The number of clients.
        regularisation: λ, at least 0.
        seed: Seed of the division.
        batch_size: The size of minibatches; None for all samples of a client.
        split: `"equal"`; or `"random"` for any division with the same probability in which every
            client has more than a fortieth of the mean number of samples.
        variant: `"paper"` for λ/2 ‖w‖², `"released"` for λ/(2 d_i) ‖w‖².

    Returns:
        The problem.

    Raises:
        InvalidInput: If there are more clients than samples, `regularisation` is negative, or
            `split` or `variant` is not known.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> inputs, labels = np.eye(5), np.array([0, 1, 0, 1, 1])
        >>> problem = fs.problems.logistic_regression(inputs, labels, clients=2)
        >>> problem.samples.mask.sum(axis=1).tolist()
        [3, 2]
    """
    parts = deal(len(labels), clients, seed, split)
    check_positive("regularisation", regularisation, zero=True)
    width = max(map(len, parts))
    index = np.stack([np.append(part, np.full(width - len(part), part[0])) for part in parts])
    mask = np.arange(width) < np.asarray([len(part) for part in parts])[:, None]
    return Problem(
        objective=LogisticLoss(regularisation, released(variant)),
        clients={
            "inputs": np.asarray(inputs, np.float32)[index],
            "labels": np.asarray(labels, np.float32)[index],
            "mask": mask,
        },
        params=np.zeros(inputs.shape[1]),
        batch_size=batch_size,
    )


def deal(samples: int, clients: int, seed: int, split: str = "equal") -> list[np.ndarray]:
    """Shuffle the samples' indices and divide them in equal parts, or at random points."""
    check_count("clients", clients)
    if split not in ("equal", "random"):
        raise InvalidInput(f'split must be "equal" or "random", got {split!r}.')
    if clients > samples:
        raise InvalidInput(f"{clients} clients cannot each have one of {samples} samples.")
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(samples)
    if split == "equal":
        return np.array_split(shuffled, clients)
    # Each part has `spare` samples and a part, not empty, of what is then left.
    spare = samples // (40 * clients)
    rest = samples - spare * clients
    cuts = np.sort(rng.choice(np.arange(1, rest), clients - 1, replace=False))
    return np.split(shuffled, cuts + spare * np.arange(1, clients))


def released(variant: str) -> bool:
    """Return whether the variant is that of the authors' released program; raise if unknown."""
    if variant not in ("paper", "released"):
        raise InvalidInput(f'variant must be "paper" or "released", got {variant!r}.')
    return variant == "released"


def squared_loss(w: Vector, data: Rows) -> Float[Array, ""]:
    """Compute half the mean squared error."""
    error = jnp.where(data["mask"], data["inputs"] @ w - data["targets"], 0)
    return 0.5 * jnp.sum(error**2) / jnp.sum(data["mask"])


class LogisticLoss(eqx.Module):
    """The mean logistic loss of margins ⟨a, w⟩ and labels 0 or 1, plus λ/2 ‖w‖².

    Two instances with the same λ are equal, so that they share a compiled program. With `shared`,
    λ is divided by the number of samples.
    """

    regularisation: float = eqx.field(static=True)
    shared: bool = eqx.field(static=True, default=False)

    def __call__(self, w: Vector, data: Rows) -> Float[Array, ""]:
        """Compute the loss of one client."""
        return self.of(w, data["inputs"] @ w, data["labels"], data["mask"])

    def of(
        self, w: Vector, margin: Float[Array, " s"], labels: Leaf, mask: Leaf
    ) -> Float[Array, ""]:
        """Compute the loss from the margins."""
        loss = jnp.where(mask, softplus(margin) - labels * margin, 0)
        count = jnp.sum(mask)
        ridge = 0.5 * self.regularisation * jnp.sum(w**2)
        return jnp.sum(loss) / count + (ridge / count if self.shared else ridge)


def _aligned(shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
    """Return zeros that JAX can use without a copy: on a CPU they must be aligned to 64 bytes."""
    size = 4 * int(np.prod(shape))
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(np.float32).reshape(shape)


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw from the standard normal distribution."""
    return rng.standard_normal(shape, np.float32)


def _student(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw from the Student-t distribution with 5 degrees of freedom."""
    return rng.standard_t(5, shape)


def _uniform(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw from the uniform distribution on [−5, 5]."""
    return rng.random(shape, np.float32) * 10 - 5
