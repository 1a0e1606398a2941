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

import contextlib
import copy
import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind
from fedsolve.problem.constraints import Constraint, as_constraint
from fedsolve.problem.local_pass import Follows, LocalWork, Walked
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Mask, Samples
from fedsolve.torch.callback import call
from fedsolve.torch.called import Host, real_samples, seed_of, words_of
from fedsolve.torch.corrections import Corrected
from fedsolve.torch.descent import callback_problem
from fedsolve.torch.module import Network, as_array
from fedsolve.torch.pool import Clients
from fedsolve.torch.problem import ENTRY, network_of
from fedsolve.torch.problem import problem as module_problem
from fedsolve.torch.randomness import seeded
from fedsolve.types import Vector

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
    loss: Callable[..., Any],
    datasets: Datasets,
    constraint: Constraint | Callable[..., Any] | None,
    options: dict[str, Any],
) -> Problem:
    """Make the problem whose clients have Datasets, for evaluation."""
    if options.get("batch_size") is not None:
        raise InvalidInput("train decides its minibatches: leave batch_size out.")
    if constraint is not None:
        constraint = as_constraint(constraint).adapt(
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


class Datasets:
    """Clients' Datasets, which stay on the host: only their numbers go through JAX."""

    def __init__(self, each: Sequence[Any]):
        self.each = tuple(each)

    def samples(self) -> Samples:
        """Return the clients' data for JAX: numbers, and masks from which sizes follow."""
        sizes = np.array([_size_of(data) for data in self.each])
        mask = np.arange(sizes.max()) < sizes[:, None]
        return Samples({DATASET: np.arange(len(sizes), dtype=np.int32)}, mask)

    def of(self, data: Any, mask: Mask = None, order: Host | None = None) -> Any:
        """Return the Dataset that the data stand for; where it is restricted, a part of it."""
        dataset = self.each[int(data[DATASET])]
        if order is None:
            return dataset
        if isinstance(dataset, torch.utils.data.DataLoader):
            raise InvalidInput(
                "The algorithm lets clients use a part of their samples: give Datasets as clients, "
                "not DataLoaders."
            )
        return torch.utils.data.Subset(dataset, np.asarray(order)[mask.astype(bool)].tolist())

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of (module, numbers) for one of (module, Dataset)."""
        if not callable(function):
            raise InvalidInput(f"A function of (module, data) is needed, got {function!r}.")

        def on(module: torch.nn.Module, data: PyTree) -> Any:
            with seeded(0):  # a shuffled loader draws an order in evaluation, too
                return function(module, self.of(data))

        return on


def as_datasets(clients: object) -> Datasets | None:
    """Return the clients as Datasets; None if they are arrays."""
    if isinstance(clients, str | bytes) or not isinstance(clients, Sequence) or not clients:
        return None
    kinds = torch.utils.data.Dataset, torch.utils.data.DataLoader
    if not all(isinstance(data, kinds) for data in clients):
        return None
    for index, data in enumerate(clients):
        if _size_of(data) == 0:
            raise InvalidInput(f"Client {index}'s Dataset is empty or has no length.")
    return Datasets(clients)


def _size_of(data: Any) -> int:
    """Return the number of samples of a Dataset or DataLoader; 0 if it has no length."""
    dataset = data.dataset if isinstance(data, torch.utils.data.DataLoader) else data
    return len(dataset) if hasattr(dataset, "__len__") else 0


def _with_training(
    problem: Problem,
    network: Network,
    train: Train,
    train_constraint: Train | None,
    datasets: Datasets | None,
) -> Problem:
    """Return the problem with training loops in place of local steps."""
    if train_constraint is not None and problem.constraint is None:
        raise InvalidInput("train_constraint is for a constraint, and the problem has none.")
    shared = problem.layout.names(problem.params)
    changed = tuple(sorted(problem.state or {}))
    trainers = [
        Trainer(name, function, network, sorted(problem.params), shared, changed, datasets)
        for name, function in (("train", train), ("train_constraint", train_constraint))
        if function is not None
    ]
    one = jax.tree.map(lambda leaf: np.asarray(leaf[0]), problem.samples)
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

    def __init__(self, objective: Callable[..., Any], trainers: Sequence[Trainer]):
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
        change, directions, *state = call(
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
        parts = [self._shared(work, vector) for vector in (change, directions)]
        return Walked(*parts, structure.unflatten(state))

    def _shared(self, work: LocalWork, full: Vector) -> Vector:
        """Return the trained part of a vector of all parameters."""
        parts, start = {}, 0
        for name in self.trainers[0].names:
            like = work.params[name]
            parts[name] = full[start : start + like.size].reshape(like.shape)
            start += like.size
        return work.ravel(parts)

    def _in_full(self, work: LocalWork, vector: Vector) -> Vector:
        """Return a vector of the trained parameters with zeros for the others."""
        _, back = jax.vjp(
            lambda full: self._shared(work, full), jnp.zeros(self._size(work), vector.dtype)
        )
        return back(vector)[0]

    def _size(self, work: LocalWork) -> int:
        return sum(work.params[name].size for name in self.trainers[0].names)


class Trainer:
    """A training loop of the user's own, applied to one client. NumPy and PyTorch alone.

    Args:
        name: What the function is, for messages.
        train: The function of (module, data, key).
        network: The module.
        names: The parameters by name, in the order of the vector.
        trained: Those that are trained; None for all.
        changed: The buffers that are sent with them.
        datasets: The clients' Datasets, if they have any.
    """

    def __init__(
        self,
        name: str,
        train: Train,
        network: Network,
        names: Sequence[str],
        trained: Sequence[str] | None,
        changed: Sequence[str],
        datasets: Datasets | None,
    ):
        if not callable(train):
            raise InvalidInput(f"{name} must be a function of (module, data, key), got {train!r}.")
        self.name, self.train, self.network = name, train, network
        self.names, self.trained = list(names), None if trained is None else set(trained)
        self.changed, self.datasets = tuple(changed), datasets

    def run(
        self,
        w: Host,
        data: PyTree,
        mask: Mask,
        order: PyTree,
        words: Host,
        state: Any,
        correction: dict[str, Host],
        corrected: bool = False,
    ) -> list[Host]:
        """Train one client.

        Returns:
            The change of the parameters w_0 − w_E, the mean of the corrected gradients of its
            steps (the change, if there is no correction), and the buffers.
        """
        module, params = self._module(w, state or {})
        start = {name: p.detach().clone() for name, p in params.items()}
        seed, directions = seed_of(words), None
        with contextlib.ExitStack() as stack:
            if corrected:
                stack.enter_context(corrections := self._corrected(params, correction))
            stack.enter_context(seeded(seed))
            stack.enter_context(torch.enable_grad())
            found = self.train(module, self._data(w.dtype, data, mask, order), seed)
            if corrected:
                directions = corrections.directions()
        after = self._parameters(module if found is None else found)
        change = _joined({name: start[name] - after[name].detach() for name in self.names})
        buffers = dict((module if found is None else found).named_buffers())
        return [
            change.astype(w.dtype, copy=False),
            change if directions is None else _joined({n: directions[n] for n in self.names}),
            *(as_array(buffers[name]).copy() for name in sorted(state or {})),
        ]

    def _module(
        self, w: Host, state: Mapping[str, Host]
    ) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
        """Return a fresh copy of the module, with parameters at w and these buffers."""
        module = self.network.fresh(torch.from_numpy(np.empty(0, w.dtype)).dtype, True)
        params, buffers = self._parameters(module), dict(module.named_buffers())
        ends = np.cumsum([params[name].numel() for name in self.names])[:-1]
        with torch.no_grad():
            for name, part in zip(self.names, np.split(w, ends), strict=True):
                params[name].copy_(torch.from_numpy(np.array(part)).view(params[name].shape))
                if self.trained is not None and name not in self.trained:
                    params[name].requires_grad_(False)
            for name, array in state.items():
                buffers[name].copy_(torch.from_numpy(np.array(array)))
        return module, params

    def _parameters(self, module: object) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are sent; raise if it is another kind of module."""
        if not isinstance(module, torch.nn.Module):
            raise InvalidInput(
                f"{self.name} must train the module that it is given, or return the trained one, "
                f"got {type(module).__name__}."
            )
        found = dict(module.named_parameters())
        shapes = {name: tuple(found[name].shape) for name in self.names if name in found}
        if shapes != {name: self.network.params[name].shape for name in self.names}:
            raise InvalidInput(
                f"{self.name} returns a module whose parameters differ in name or shape from those "
                "of the given one."
            )
        return {name: found[name] for name in self.names}

    def _data(self, dtype: np.dtype, data: PyTree, mask: Mask, order: PyTree) -> Any:
        """Return the client's data as its Dataset, or as tensors without padding."""
        if self.datasets is not None:
            return self.datasets.of(data, mask, order)
        real = real_samples(Samples(data, mask, order).gathered().values, mask)

        def tensor(array: Host) -> torch.Tensor:
            return torch.from_numpy(np.array(array, dtype if array.dtype.kind == "f" else None))

        seen = jax.tree.map(tensor, real)
        return seen[ENTRY] if isinstance(seen, dict) and list(seen) == [ENTRY] else seen

    def _corrected(
        self, params: Mapping[str, torch.nn.Parameter], correction: Mapping[str, Host]
    ) -> Corrected:
        shift, proximity = correction.get("shift"), correction.get("proximity")
        parts = None
        if shift is not None:
            sizes = [params[name].numel() for name in self.names]
            split = torch.from_numpy(np.array(shift)).split(sizes)
            parts = {n: s.view(params[n].shape) for n, s in zip(self.names, split, strict=True)}
        if self.trained is not None:
            params = {name: p for name, p in params.items() if name in self.trained}
        return Corrected(params, parts, None if proximity is None else float(proximity))

    def check(self, params: Mapping[str, Host], one: Samples, buffers: str) -> None:
        """Train client 0 once; raise with a sentence if that cannot be right."""
        w = np.concatenate([np.ravel(params[name]) for name in self.names])
        w = w.astype(jax.dtypes.canonicalize_dtype(w.dtype))
        before, state = _common_randomness(), {n: self.network.buffers[n] for n in self.changed}
        words = np.array([1, 2], np.uint32)
        seen = _Watched(self)
        try:
            change, *_ = seen.run(w, one.values, one.mask, None, words, state, {})
        except InvalidInput:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InvalidInput(f"{self.name} failed on client 0's data: {reason}") from error
        for (library, advice), old, new in zip(
            RANDOM.items(), before, _common_randomness(), strict=True
        ):
            if old != new:
                raise InvalidInput(
                    f"{self.name} uses the random state of {library} that all clients share, so "
                    f"runs could not be repeated; {advice}."
                )
        moved = seen.moved() - set(self.changed)
        if moved and buffers != "frozen":
            raise InvalidInput(
                f"{self.name} changes the buffers {', '.join(sorted(moved))}, which the loss does "
                'not: put these layers in .eval() mode, or give buffers="frozen".'
            )
        if self.name == "train" and not np.any(change):
            raise InvalidInput(
                "train left the module's parameters as they were; it must train the module that it "
                "is given, or return the trained one."
            )


class _Watched:
    """A trainer's single run, after which its module's buffers can be compared."""

    def __init__(self, trainer: Trainer):
        self._trainer, self._found = copy.copy(trainer), {}
        train = trainer.train

        def watched(module: torch.nn.Module, data: Any, key: int) -> Any:
            returned = train(module, data, key)
            kept = module if returned is None else returned
            if isinstance(kept, torch.nn.Module):
                self._found = {n: as_array(b).copy() for n, b in kept.named_buffers()}
            return returned

        self._trainer.train = watched
        self.run = self._trainer.run

    def moved(self) -> set[str]:
        """Return the buffers that were changed."""
        old = self._trainer.network.buffers
        return {n for n, b in self._found.items() if n in old and not np.array_equal(old[n], b)}


RANDOM = {
    "PyTorch": "leave out torch.manual_seed, since PyTorch's numbers follow the run's seed here",
    "NumPy": "use np.random.default_rng(key)",
    "Python's random": "use random.Random(key)",
}


def _common_randomness() -> list[bytes]:
    """Return the random states that all threads share."""
    legacy = np.random.get_state(legacy=True)  # noqa: NPY002 (to see whether it moved)
    return [
        torch.get_rng_state().numpy().tobytes(),
        np.asarray(legacy[1]).tobytes() + repr(legacy[2:]).encode(),
        repr(random.getstate()).encode(),
    ]


def _joined(parts: Mapping[str, torch.Tensor]) -> Host:
    return np.concatenate([as_array(part).ravel() for part in parts.values()])
