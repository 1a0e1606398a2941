"""A training loop of the user's own as the local work of clients.

    def train(module, data, key):  # one client's data, as tensors or as its Dataset
        loader = DataLoader(data, batch_size=32, shuffle=True)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(module(images), labels).backward()
            optimizer.step()

    problem = fs.torch.training(net, train, datasets, loss)
    run = fs.solve(problem, fs.FedAvg(1.0, participants=10), rounds=100)

In every round a client gets a copy of the module at w, trains it, and sends w_0 − w_E. The whole
of it is one call for all clients of a cohort, which run in threads with one PyTorch thread each.
Random numbers that PyTorch draws in `train` follow (seed, round, exchange, client), in all runtimes
and whatever runs beside it; PyTorch's own generator is neither read nor moved.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.local_pass import LocalWork, Walked
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Mask, Samples
from fedsolve.torch.callback import call
from fedsolve.torch.corrections import Corrected
from fedsolve.torch.pool import Clients
from fedsolve.torch.problem import problem as module_problem
from fedsolve.torch.randomness import seeded
from fedsolve.torch.tensors import as_array, as_tensor, real_samples

DATASET = "dataset"  # the entry of the clients' data with the number of a client's Dataset
Train = Callable[[torch.nn.Module, Any, int], torch.nn.Module | None]


def training(
    module: torch.nn.Module | Problem,
    train: Train,
    clients: PyTree = None,
    loss: Callable[..., Any] | None = None,
    constraint: Constraint | Callable[..., Any] | None = None,
    *,
    train_constraint: Train | None = None,
    **options: Any,
) -> Problem:
    """Make a `Problem` whose clients train a PyTorch module by a function of your own.

    `train(module, data, key)` trains the module in place, or returns the trained one. It may use
    any optimizer, schedule, `DataLoader` or number of epochs. A client sends the change of the
    parameters, w_0 − w_E, so an algorithm's `step_size` is the server's (1.0 averages the clients'
    models), and `local_steps`, `local_epochs` and `local_optimizer` are not given.

    Algorithms whose local steps follow the objective's gradient can be used: FedAvg, FedAvgAll,
    PPBC and others. Where an algorithm corrects each step (SCAFFOLD, FedProx, FedDyn), the
    correction is added to the gradients before each step of a `torch.optim` optimizer. FedSGM with
    hard switching calls `train_constraint` in the rounds in which it follows the constraint. Others
    raise.

    Random numbers that PyTorch draws follow the run's seed. For others, make a generator of `key`,
    such as `np.random.default_rng(key)`. Activation checkpointing draws dropout anew: do not use
    both.

    `train` is called once, for client 0, when the problem is made, so that errors are raised then.

    Args:
        module: The module, which is copied and never changed; or a problem that
            `fs.torch.problem` made, whose data and functions are used.
        train: The function of (module, data, key). `data` are one client's data as tensors without
            padding, or its `Dataset`; `key` is a whole number below 2^63.
        clients: A list of `Dataset` objects, one for each client, which stay as they are; or all
            clients' data, as for `fs.torch.problem`.
        loss: f_j, a function of (module, data) that returns a scalar tensor, for evaluation.
        constraint: g_j in the form of `loss`, or a `Constraint`.
        train_constraint: As `train`, for rounds in which clients reduce the constraint.
        **options: Other arguments of `fs.torch.problem`.

    Returns:
        The problem.

    Raises:
        InvalidInput: If `train` fails, trains nothing, returns something else than a module, or
            depends on random state that all clients share.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> import torch
        >>> def loss(module, data):
        ...     return torch.mean((module(data["x"])[:, 0] - data["y"]) ** 2)
        >>> def train(module, data, key):
        ...     optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         loss(module, data).backward()
        ...         optimizer.step()
        >>> data = {"x": np.ones((3, 4, 2)), "y": np.zeros((3, 4))}
        >>> problem = fs.torch.training(torch.nn.Linear(2, 1), train, data, loss)
        >>> run = fs.solve(problem, fs.FedAvg(1.0, participants=2), rounds=3)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """
    if isinstance(module, Problem):
        if clients is not None or loss is not None or constraint is not None or options:
            raise InvalidInput(
                "The problem has its data and functions: give training(problem, train), or "
                "training(module, train, clients, loss)."
            )
        return _with_training(module, train, train_constraint, None)
    check_kind("module", module, torch.nn.Module)
    if clients is None or loss is None:
        raise InvalidInput("training(module, train, clients, loss) needs clients and a loss.")
    datasets = as_datasets(clients)
    if datasets is not None:
        if options.get("batch_size") is not None:
            raise InvalidInput("train decides its minibatches: leave batch_size out.")
        find = _Found(datasets)
        clients, loss = find.clients(), find.within(loss)
        if constraint is not None and not isinstance(constraint, Constraint):
            constraint = find.within(constraint)
    made = module_problem(module, loss, clients, constraint, **options)
    return _with_training(made, train, train_constraint, datasets)


def as_datasets(clients: object) -> list[Any] | None:
    """Return the clients as a list of Datasets; None if they are arrays."""
    if not isinstance(clients, Sequence) or not clients:
        return None
    if not all(isinstance(data, torch.utils.data.Dataset) for data in clients):
        return None
    for index, data in enumerate(clients):
        if not hasattr(data, "__len__") or len(data) == 0:
            raise InvalidInput(f"Client {index}'s Dataset is empty or has no length.")
    return list(clients)


class _Found:
    """Clients' Datasets, which stay on the host: only their numbers go through JAX."""

    def __init__(self, datasets: Sequence[Any]):
        self.datasets = datasets

    def clients(self) -> dict[str, np.ndarray]:
        """Return the clients' data for JAX: numbers, and masks from which sizes follow."""
        sizes = np.array([len(data) for data in self.datasets])
        mask = np.arange(sizes.max()) < sizes[:, None]
        return {DATASET: np.arange(len(sizes), dtype=np.int32), "mask": mask}

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of (module, numbers) for one of (module, Dataset)."""
        if not callable(function):
            raise InvalidInput(f"A function of (module, data) is needed, got {function!r}.")
        return lambda module, data: function(module, self.datasets[int(data[DATASET])])


class Trained:
    """An objective whose local work is a training loop.

    Args:
        objective: The objective, for evaluation.
        trainers: The training loops of the objective and, if there is one, of the constraint.
    """

    def __init__(self, objective: Callable[..., Any], trainers: Sequence[Trainer]):
        self.objective = objective
        self.trainers = tuple(trainers)
        self._calls = [Clients(trainer.train) for trainer in trainers]
        self.__signature__ = inspect.signature(objective)

    def __call__(self, *given: PyTree) -> Any:
        """Return the objective's value."""
        return self.objective(*given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["objective"], name)

    def local_pass(self, work: LocalWork) -> Walked:
        """Train, in one call for all clients."""
        if work.step_size is not None and work.steps != 1:
            pass
        if work.sigma is None:
            return self._train(0, work)
        if len(self.trainers) < 2:
            raise InvalidInput(
                "In rounds of the constraint clients train to reduce it: give "
                "fs.torch.training the function train_constraint(module, data, key)."
            )
        return jax.lax.cond(
            work.sigma > 0, lambda: self._train(1, work), lambda: self._train(0, work)
        )

    def _train(self, which: int, work: LocalWork) -> Walked:
        leaves, structure = jax.tree.flatten(work.samples.state)
        w = jax.ShapeDtypeStruct(work.w.shape, work.w.dtype)
        results = [w, w, *(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)]
        samples, correction = work.samples.gathered(), work.correction
        shift, proximity = correction.shift, correction.proximity
        if proximity is not None:
            proximity = jnp.asarray(proximity, work.w.dtype)
        given = samples.values, samples.mask, work.noise, work.samples.state, shift, proximity
        change, directions, *state = call(self._calls[which], results, work.w, *given)
        return Walked(change, directions, structure.unflatten(state))
