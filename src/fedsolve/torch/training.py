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

import functools
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.layout import PERSONAL, SHARED
from fedsolve.problem.local_pass import Follows, LocalWork, Walked
from fedsolve.problem.problem import Problem
from fedsolve.problem.several import Parts, constraint_of
from fedsolve.torch.callback import call
from fedsolve.torch.called import words_of
from fedsolve.torch.datasets import Datasets, as_datasets
from fedsolve.torch.descent import callback_problem
from fedsolve.torch.module import Network
from fedsolve.torch.named import check_no_named
from fedsolve.torch.pool import Clients
from fedsolve.torch.problem import network_of
from fedsolve.torch.problem import problem as module_problem
from fedsolve.torch.trainer import Trainer
from fedsolve.types import Function


def training(
    module: Any,
    train: Any,
    clients: PyTree = None,
    loss: Function | None = None,
    constraint: Constraint | Function | Parts | None = None,
    *,
    train_constraint: Any = None,
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

    With `personal=` each client keeps these parameters, and `train` trains them with the others.

    Random numbers that PyTorch draws follow the run's seed. For others, make a generator of `key`,
    such as `np.random.default_rng(key)`. Activation checkpointing draws dropout anew: do not use
    both.

    `train` is called once, for client 0, when the problem is made, so that errors are raised then.

    Args:
        module: The module, which is copied and never changed; or a problem that
            `fs.torch.problem` made, whose data and functions are used.
        train: The function of (module, data, key). `data` are one client's data as tensors without
            padding, or its `Dataset`; `key` is a whole number below 2^63.
        clients: A list of `Dataset` (or `DataLoader`) objects, one for each client, which are given
            to the functions as they are; or all clients' data, as for `fs.torch.problem`.
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
        ...     optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         loss(module, data).backward()
        ...         optimizer.step()
        >>> data = {"x": np.ones((3, 4, 2)), "y": np.zeros((3, 4))}
        >>> _ = torch.manual_seed(0)
        >>> problem = fs.torch.training(torch.nn.Linear(2, 1), train, data, loss)
        >>> run = fs.solve(problem, fs.FedAvg(1.0, participants=2), rounds=20)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """
    if isinstance(module, Problem):
        if clients is not None or loss is not None or constraint is not None or options:
            raise InvalidInput(
                "The problem has its data and functions: give training(problem, train), or "
                "training(module, train, clients, loss)."
            )
        return _with_training(module, network_of(module), train, train_constraint, None)
    check_kind("module", module, torch.nn.Module)
    if clients is None or loss is None:
        raise InvalidInput("training(module, train, clients, loss) needs clients and a loss.")
    datasets = as_datasets(clients)
    if datasets is None:
        made = module_problem(module, loss, clients, constraint, **options)
    else:
        made = _of_datasets(module, loss, datasets, constraint, options)
    return _with_training(made, network_of(made), train, train_constraint, datasets)


def _of_datasets(
    module: torch.nn.Module,
    loss: Function,
    datasets: Datasets,
    constraint: Constraint | Function | Parts | None,
    options: dict[str, Any],
) -> Problem:
    """Make the problem whose clients have Datasets, for evaluation."""
    if options.get("batch_size") is not None:
        raise InvalidInput("train decides its minibatches: leave batch_size out.")
    check_no_named(constraint)
    if constraint is not None:
        constraint = constraint_of(constraint).adapt(
            lambda function, sums=False: datasets.within(function)
        )
    test, metrics = options.pop("test", None), options.pop("metrics", None)
    samples = datasets.samples()
    return callback_problem(
        module,
        datasets.within(loss),
        constraint,
        samples,
        None,
        test,
        metrics,
        options,
        smooth=False,
    )


def _with_training(
    problem: Problem,
    network: Network,
    train: Any,
    train_constraint: Any,
    datasets: Datasets | None,
) -> Problem:
    """Return the problem with training loops in place of local steps."""
    if train_constraint is not None and problem.constraint is None:
        raise InvalidInput("train_constraint is for a constraint, and the problem has none.")
    layout, params = problem.layout, problem.params
    shared, own = layout.names(params), layout.names(params, PERSONAL)
    changed = tuple(sorted(problem.state or {}))
    one = jax.tree.map(lambda leaf: np.asarray(leaf[0]), problem.samples)
    given = network, sorted(params), shared, own, changed, datasets, one.values
    trainers = [
        Trainer(name, function, *given)
        for name, function in (("train", train), ("train_constraint", train_constraint))
        if function is not None
    ]
    for trainer in trainers:
        trainer.check(problem.params, one, problem.buffers)
    return problem.with_objective(Trained(problem.given[0], trainers))


class Trained:
    """An objective whose local work is a training loop.

    Args:
        objective: The objective, for evaluation.
        trainers: The training loops of the objective and, if there is one, of the constraint.
    """

    trains_itself: ClassVar[bool] = True

    def __init__(self, objective: Function, trainers: Sequence[Trainer]):
        self.objective = objective
        self.trainers = tuple(trainers)
        self._calls = {
            (which, corrected): Clients(functools.partial(trainer.run, corrected=corrected))
            for which, trainer in enumerate(trainers)
            for corrected in (False, True)
        }
        self.__signature__ = inspect.signature(objective)
        names = [getattr(t.train, "__qualname__", type(t.train).__qualname__) for t in trainers]
        self.__qualname__ = " ".join(names)  # for the identity of a run

    def __call__(self, *given: PyTree) -> Any:
        """Return the objective's value."""
        return self.objective(*given)

    def local_pass(self, work: LocalWork) -> Walked:
        """Train, in one call for all clients."""
        follows = work.follows
        if follows is None:
            raise InvalidInput(
                "A training loop follows the objective's gradient; this algorithm's local steps "
                "follow something else (FedSGM: use hard switching)."
            )
        if follows.sigma is None:
            return self._train(0, work, follows)
        if len(self.trainers) == 1:
            raise InvalidInput(
                "In rounds of the constraint clients train to reduce it: give "
                "fs.torch.training a function train_constraint(module, data, key)."
            )
        return jax.lax.cond(
            follows.sigma > 0,
            lambda: self._train(1, work, follows),
            lambda: self._train(0, work, follows),
        )

    def _train(self, which: int, work: LocalWork, follows: Follows) -> Walked:
        names = self.trainers[which].names
        full = jnp.concatenate([jnp.ravel(work.params[name]) for name in names])
        leaves, structure = jax.tree.flatten(work.samples.state)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (full, full, *leaves)]
        correction = {}
        if follows.shift is not None:
            correction["shift"] = self._in_full(work, follows.shift)
        if follows.proximity is not None:
            correction["proximity"] = jnp.asarray(follows.proximity, full.dtype)
        samples = work.samples
        found = call(
            self._calls[which, bool(correction)],
            shapes,
            full,
            samples.values,
            samples.mask,
            samples.order,
            words_of(work.key),
            samples.state,
            correction,
        )
        change, directions = (self._part(work, vector) for vector in found[:2])
        own = self._part(work, found[0], PERSONAL) if work.has_personal else None
        return Walked(change, directions, structure.unflatten(found[2:]), own)

    def _part(self, work: LocalWork, full: Array, kind: str = SHARED) -> Array:
        """Return the parameters of a kind, of a vector of all parameters."""
        parts, start = {}, 0
        for name in self.trainers[0].names:
            like = work.params[name]
            parts[name] = full[start : start + like.size].reshape(like.shape)
            start += like.size
        return work.ravel(parts, kind)

    def _in_full(self, work: LocalWork, vector: Array) -> Array:
        """Return a vector of the trained parameters with zeros for the others."""
        _, back = jax.vjp(
            lambda full: self._part(work, full), jnp.zeros(self._size(work), vector.dtype)
        )
        return back(vector)[0]

    def _size(self, work: LocalWork) -> int:
        return sum(work.params[name].size for name in self.trainers[0].names)
