"""Problems whose model is a PyTorch module: `problem` makes one, `load` copies a result back.

    net = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(model, data):  # the module itself, and one client's data as tensors
        return F.binary_cross_entropy_with_logits(model(data["x"])[:, 0], data["y"])

    problem = fs.torch.problem(net, loss, clients={"x": x, "y": y})
    run = fs.solve(problem, fs.FedSGM(0.1), rounds=100)
    fs.torch.load(net, run.params)

The compiled program calls back into Python, where PyTorch computes value and gradient in one pass,
client by client. Padding is removed before the call: a loss sees only its client's samples, so it
is exact whatever it does with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np
import torch
from jaxtyping import PyTree
from numpy.typing import ArrayLike

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Leaf, Samples, as_samples
from fedsolve.torch.called import Value
from fedsolve.torch.descent import callback_problem
from fedsolve.torch.module import Network

ENTRY = "all"  # the name of data that have a mask and are no dict


def problem(
    module: torch.nn.Module,
    loss: Callable,
    clients: PyTree,
    constraint: Constraint | Callable | None = None,
    *,
    test: PyTree = None,
    metrics: Mapping[str, Callable] | None = None,
    **options: PyTree,
) -> Problem:
    """Make a `Problem` whose parameters are the module's parameters that require a gradient.

    The module is copied as it is now, and never changed. Values must be reproducible, so a module
    that draws random numbers or changes its buffers (dropout and batch normalization in training
    mode) cannot be used; call `module.eval()` first.

    PyTorch has its own threads: for a small module `torch.set_num_threads(1)` is often faster.

    Args:
        module: The module. Its parameters have the names of `named_parameters`.
        loss: f_j, a function of (model, one client's data) that returns a scalar tensor. The data
            are tensors: floating-point ones in the run's precision, as the module is, others of the
            type that was given. There is no mask, as padding is removed.
        clients: All clients' data as for `Problem`, arrays or tensors.
        constraint: g_j in the form of `loss`, or a `Constraint` made of such functions (a
            `Statistics` combines its sums on the server, in JAX).
        test: Data for the metrics, arrays or tensors.
        metrics: Functions of (model, test), by name.
        **options: Other arguments of `Problem`.

    Returns:
        The problem.

    Raises:
        InvalidInput: If the module has no parameters that require a gradient, or a function fails,
            has no gradient, draws random numbers or changes buffers.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> import torch
        >>> net = torch.nn.Linear(2, 1)
        >>> def loss(model, data):
        ...     return torch.mean((model(data["x"])[:, 0] - data["y"]) ** 2)
        >>> data = {"x": np.ones((3, 4, 2)), "y": np.zeros((3, 4))}
        >>> problem = fs.torch.problem(net, loss, clients=data)
        >>> problem.n, sorted(problem.params)
        (3, ['bias', 'weight'])
    """
    check_kind("module", module, torch.nn.Module)
    samples = as_samples(jax.tree.map(_array, clients))
    entry = None
    if samples.mask is not None and not isinstance(samples.values, dict):
        entry = ENTRY  # Problem hands a mask over as one more entry of a dict
        samples = Samples({entry: samples.values}, samples.mask)
    test = jax.tree.map(_array, test)
    return callback_problem(module, loss, constraint, samples, entry, test, metrics, options)


def load(module: torch.nn.Module, params: Mapping[str, Leaf]) -> torch.nn.Module:
    """Copy parameters, such as `run.params`, into the module.

    Args:
        module: The module that the problem was made of, or one with the same parameters.
        params: The parameters, by name.

    Returns:
        The same module.

    Raises:
        InvalidInput: If names or shapes do not fit the module.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> import torch
        >>> params = {"bias": np.zeros(1), "weight": np.array([[1.0, 2.0]])}
        >>> net = fs.torch.load(torch.nn.Linear(2, 1), params)
        >>> net(torch.ones(2)).tolist()
        [3.0]
    """
    own = {name: tuple(tensor.shape) for name, tensor in _trainable(module).items()}
    given = {name: np.shape(array) for name, array in params.items()}
    if own != given:
        names = sorted(k for k in own.keys() | given.keys() if own.get(k) != given.get(k))
        raise InvalidInput(
            f"params do not fit the module: names or shapes differ for {', '.join(names)}."
        )
    with torch.no_grad():
        for name, tensor in _trainable(module).items():
            tensor.copy_(torch.from_numpy(np.array(params[name])))
    return module


def network_of(problem: Problem) -> Network:
    """Return the module that a problem was made of; raise if it was not made of one."""
    objective = problem.given[0]
    if not isinstance(objective, Value):
        raise InvalidInput("training(problem, train) takes a problem of fs.torch.problem.")
    return objective.called.network


def _trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the module's parameters that require a gradient, by name."""
    return {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}


def _array(leaf: torch.Tensor | ArrayLike) -> np.ndarray:
    """Return an array or tensor as a NumPy array."""
    return leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
