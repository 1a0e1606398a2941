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

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from numpy.typing import ArrayLike

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind
from fedsolve.problem.constraints import Constraint, as_constraint
from fedsolve.problem.layout import Layout
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Leaf, Mask, Samples
from fedsolve.problem.stacking import as_samples
from fedsolve.torch.callback import call
from fedsolve.types import Vector

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError("fedsolve.torch needs PyTorch: install fedsolve[torch].") from error


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
    model = _Model(module)
    samples = as_samples(clients)
    entry = None
    if samples.mask is not None and not isinstance(samples.values, dict):
        entry = "all"  # Problem hands a mask over as one more entry of a dict
        samples = Samples({entry: samples.values}, samples.mask)
    local = functools.partial(_Function, model=model, samples=samples, entry=entry)
    test = jax.tree.map(_array, test)
    whole = Samples(jax.tree.map(lambda leaf: leaf[None], test))
    if constraint is not None:
        constraint = as_constraint(constraint).adapt(
            lambda function, sums=False: local("constraint", function)
        )
    return Problem(
        objective=local("loss", loss),
        clients=samples,
        params=model.params,
        constraint=constraint,
        test=test,
        metrics={
            name: _Function(f"metric {name!r}", metric, model, whole, smooth=False)
            for name, metric in (metrics or {}).items()
        },
        **options,
    )


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


class _Model:
    """Copies of the user's module, one for each precision, whose parameters are one vector."""

    def __init__(self, module: torch.nn.Module):
        own = _trainable(module)
        if not own:
            raise InvalidInput("The module has no parameters that require a gradient.")
        self.params = {name: _array(own[name]).copy() for name in sorted(own)}  # as JAX sorts them
        self.w = np.concatenate([array.ravel() for array in self.params.values()])
        self.lock = threading.Lock()  # a copy has one w at a time; XLA calls from several threads
        self._module = copy.deepcopy(module)
        self._copies: dict[torch.dtype, tuple[torch.nn.Module, list, torch.Tensor]] = {}

    def at(self, w: np.ndarray) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
        """Return the module with its parameters set to w, and these parameters."""
        point = torch.from_numpy(np.array(w))
        if point.dtype not in self._copies:  # buffers and frozen parameters follow the precision
            module = copy.deepcopy(self._module).to(point.dtype)
            params = [_trainable(module)[name] for name in self.params]
            vector = torch.empty_like(point, device=params[0].device)
            parts = vector.split([param.numel() for param in params])
            for param, part in zip(params, parts, strict=True):
                param.data = part.view(param.shape)
            self._copies[point.dtype] = module, params, vector
        module, params, vector = self._copies[point.dtype]
        vector.copy_(point)
        return module, params


@dataclasses.dataclass(eq=False)
class _Function:
    """A user's function of (model, data) in torch, as a function of (params, data) in JAX.

    It may return any structure of tensors, as for the sums of a `Statistics`; between JAX and torch
    everything is a vector.
    """

    name: str
    function: Callable
    model: _Model
    samples: Samples
    entry: str | None = None
    smooth: bool = True

    def __post_init__(self):
        if not callable(self.function):
            raise InvalidInput(
                f"The {self.name} must be a function of (model, data), got {self.function!r}."
            )
        self._in_jax = jax.custom_jvp(self._value)
        self._in_jax.defjvp(self._derivative)

    def __call__(self, params: PyTree, data: PyTree) -> PyTree:
        """Compute the function in JAX."""
        mask = None
        if isinstance(data, dict) and "mask" in data and "mask" not in self.samples.values:
            data, mask = {k: v for k, v in data.items() if k != "mask"}, data["mask"]
        w = jnp.concatenate([jnp.ravel(params[name]) for name in self.model.params])
        return self.returned.unravel(self._in_jax(w, data, mask))

    def _value(self, w: Vector, data: PyTree, mask: Mask) -> Float[Array, " k"]:
        """Compute the outputs as one vector."""
        return call(self.values, [(self.returned.size,)], w, data, mask)[0]

    def _derivative(
        self, primals: tuple, tangents: tuple
    ) -> tuple[Float[Array, " k"], Float[Array, " k"]]:
        """Compute the outputs and their derivative along a tangent."""
        k, d = self.returned.size, primals[0].size
        values, slopes = call(self.values_and_slopes, [(k,), (k, d)], *primals)
        return values, jnp.sum(slopes * tangents[0], axis=-1)

    @functools.cached_property
    def returned(self) -> Layout:
        """The layout of the function's outputs in a vector.

        The function is run on all data, so that errors are raised now and not during a run.
        """
        leaves, outputs, has_gradient = jax.tree.leaves(self.samples), None, not self.smooth
        with self.model.lock, torch.random.fork_rng(devices=[]), torch.enable_grad():
            before = self._state()
            for index in range(len(leaves[0]) if leaves else 1):
                one = jax.tree.map(lambda leaf, i=index: leaf[i], self.samples)
                try:
                    _, outputs = self._run(self.model.w, one.values, one.mask)
                except Exception as error:
                    where = f"client {index}'s data" if self.smooth else "the test data"
                    reason = f"{type(error).__name__}: {error}".splitlines()[0]
                    raise InvalidInput(f"The {self.name} failed on {where}: {reason}") from error
                has_gradient |= any(leaf.requires_grad for leaf in jax.tree.leaves(outputs))
            after = self._state()
        if not all(a.equal(b) for a, b in zip(before, after, strict=True)):
            raise InvalidInput(
                f"The {self.name} draws random numbers or changes the module's buffers, as dropout "
                "and batch normalization do in training mode; call module.eval() first."
            )
        if not has_gradient:
            raise InvalidInput(
                f"The {self.name} has no gradient: it must return a tensor computed from the "
                "module's parameters, without .item() or .detach()."
            )
        return Layout.of(jax.tree.map(_array, outputs))

    def _state(self) -> list[torch.Tensor]:
        """Return what a call must not change, so that the next one gives the same value."""
        module, _ = self.model.at(self.model.w)
        return [torch.get_rng_state(), *(buffer.clone() for buffer in module.buffers())]

    # The methods below use NumPy and torch alone: they must not wait for JAX, which waits for them.

    def values(self, w: np.ndarray, data: PyTree, mask: Mask) -> list[np.ndarray]:
        """Compute the outputs for one client."""
        # With gradients enabled here too: a loss may differentiate with respect to its inputs.
        with self.model.lock, torch.enable_grad():
            _, outputs = self._run(w, data, mask)
            return [_array(_flat(outputs))]

    def values_and_slopes(self, w: np.ndarray, data: PyTree, mask: Mask) -> list[np.ndarray]:
        """Compute the outputs for one client, and their derivatives by w."""
        with self.model.lock, torch.enable_grad():
            params, outputs = self._run(w, data, mask)
            values = _flat(outputs)
            slopes = np.zeros((len(values), len(w)), w.dtype)
            if values.requires_grad:  # or else the outputs do not depend on the parameters
                for row, value in zip(slopes, values, strict=True):
                    parts = torch.autograd.grad(
                        value, params, retain_graph=True, materialize_grads=True
                    )
                    row[:] = np.concatenate([_array(part).ravel() for part in parts])
            return [_array(values), slopes]

    def _run(self, w: np.ndarray, data: PyTree, mask: Mask) -> tuple[list, PyTree]:
        """Return the parameters, and the user's function of the module and the real samples."""
        module, params = self.model.at(w)

        def tensor(array: np.ndarray, given: np.ndarray) -> torch.Tensor:
            # A copy, since torch must not write to JAX's memory.
            kind = w.dtype if given.dtype.kind == "f" else given.dtype
            return torch.from_numpy(np.array(array, kind)).to(params[0].device)

        seen = jax.tree.map(tensor, _real(data, mask), self.samples.values)
        outputs = self.function(module, seen[self.entry] if self.entry else seen)
        return params, jax.tree.map(lambda leaf: torch.as_tensor(leaf).to(params[0]), outputs)


def _flat(outputs: PyTree) -> torch.Tensor:
    """Return the outputs as one vector."""
    return torch.cat([leaf.reshape(-1) for leaf in jax.tree.leaves(outputs)])


def _real(data: PyTree, mask: Mask) -> PyTree:
    """Return the samples without padding."""
    if isinstance(mask, dict):
        return {name: _real(entry, mask[name]) for name, entry in data.items()}
    return data if mask is None else jax.tree.map(lambda leaf: leaf[mask.astype(bool)], data)


def _trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the module's parameters that require a gradient, by name."""
    return {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}


def _array(leaf: torch.Tensor | ArrayLike) -> np.ndarray:
    """Return an array or tensor as a NumPy array."""
    return leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
