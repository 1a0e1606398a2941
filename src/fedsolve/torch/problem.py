"""Problems whose model is a PyTorch module: `problem` makes one, `load` copies a result back.

    net = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss(model, data):  # the module itself, and one client's data as tensors
        return F.binary_cross_entropy_with_logits(model(data["x"])[:, 0], data["y"])

    problem = fs.torch.problem(net, loss, clients={"x": x, "y": y})
    run = fs.solve(problem, fs.FedSGM(0.1), rounds=100)
    fs.torch.load(net, run.params)

Where it can be done, module and loss are compiled: `export` traces them to a graph of PyTorch's
operators, and `interpret` runs this graph in JAX. torchax does the same; it was tried and has three
disadvantages here: it imports names that torch 2.13 no longer has, running statistics are not moved
in training, and its convolutions are slow where each client has weights of its own.

Where it cannot be done, the compiled program calls back into Python, where PyTorch computes value
and gradient in one pass, client by client. Padding is removed before the call: a loss sees only its
client's samples, so it is exact whatever it does with them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from numpy.typing import ArrayLike

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind
from fedsolve.problem.constraints import Constraint, as_constraint
from fedsolve.problem.layout import FROZEN, Layout
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Leaf, Mask, Samples, as_samples
from fedsolve.solving.result import Run
from fedsolve.torch.callback import call
from fedsolve.torch.compiled import Compiled
from fedsolve.torch.export import CannotCompile
from fedsolve.torch.module import Network
from fedsolve.torch.verify import check_function, compare
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
    mode: object = "auto",
    test: PyTree = None,
    metrics: Mapping[str, Callable] | None = None,
    **options: PyTree,
) -> Problem:
    """Make a `Problem` whose parameters are the module's parameters that require a gradient.

    The module is copied as it is now, and never changed. Local steps use it in the modes (`train`,
    `eval`) that its parts are in now, evaluation uses it in evaluation mode. Dropout follows the
    run's seed, and the buffers that training changes are the problem's `state`.

    Args:
        module: The module. Its parameters have the names of `named_parameters`.
        loss: f_j, a function of (model, one client's data) that returns a scalar tensor. The data
            are tensors: floating-point ones in the run's precision, as the module is, others of the
            type that was given. There is no mask, as padding is removed.
        clients: All clients' data as for `Problem`, arrays or tensors.
        constraint: g_j in the form of `loss`, or a `Constraint` made of such functions (a
            `Statistics` combines its sums on the server, in JAX).
        mode: `"compiled"` (functions become JAX programs, or it is said why they cannot),
            `"callback"` (PyTorch computes them, one client after the other) or `"auto"` (compiled
            where that is possible; a warning says where it is not, and why).
        test: Data for the metrics, arrays or tensors.
        metrics: Functions of (model, test), by name.
        **options: Other arguments of `Problem`.

    Returns:
        The problem.

    Raises:
        InvalidInput: If the module has no parameters that require a gradient, or a function fails,
            has no gradient, draws random numbers or changes buffers in evaluation mode, or cannot
            be compiled in the mode `"compiled"`.

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
    if mode not in MODES:
        raise InvalidInput(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
    samples = as_samples(jax.tree.map(_array, clients))
    entry = None
    if samples.mask is not None and not isinstance(samples.values, dict):
        entry = "all"  # Problem hands a mask over as one more entry of a dict
        samples = Samples({entry: samples.values}, samples.mask)
    given = _Given(
        module, loss, constraint, samples, entry, jax.tree.map(_array, test), dict(metrics or {})
    )
    if mode == "callback":
        return _by_callback(given, options)
    try:
        return _compiled(given, options, strict=mode == "compiled")
    except CannotCompile as reason:
        if mode == "compiled":
            raise InvalidInput(f'{reason}; mode="callback" can do it.') from reason
        found = _by_callback(given, options)
        warnings.warn(f"{reason}, so PyTorch computes it in callbacks.", stacklevel=2)
        return found


MODES = ("auto", "compiled", "callback")


@dataclasses.dataclass(frozen=True)
class _Given:
    """What the user gave."""

    module: torch.nn.Module
    loss: Callable
    constraint: Constraint | Callable | None
    samples: Samples
    entry: str | None
    test: PyTree
    metrics: dict[str, Callable]

    @property
    def whole(self) -> Samples:
        """The test data as the samples of one client."""
        return Samples(jax.tree.map(lambda leaf: leaf[None], self.test))


def _compiled(given: _Given, options: dict[str, PyTree], strict: bool) -> Problem:
    """Make a problem of functions in JAX; raise `CannotCompile` with a reason if it cannot be."""
    network = Network(given.module)
    size = options.get("batch_size")

    def compiled(name: str, function: Callable, sums: bool = False, test: bool = False) -> Compiled:
        if not callable(function):
            raise InvalidInput(f"The {name} must be a function of (model, data), got {function!r}.")
        samples, entry = (given.whole, None) if test else (given.samples, given.entry)
        found = check_function(name, function, network, samples, entry, smooth=not test)
        own = Compiled(name, function, network, samples, entry, sums, None if test else size)
        try:
            own.look_ahead(network.params, samples)
            if not test or sum(np.size(leaf) for leaf in jax.tree.leaves(samples)) <= COMPARED:
                compare(own, samples, found, smooth=not test)
        except CannotCompile as reason:
            raise CannotCompile(f"The {name} cannot be compiled: {reason}") from reason
        return own

    functions: list[Compiled] = []

    def constrained(function: Callable, sums: bool = False) -> Compiled:
        functions.append(compiled("constraint", function, sums))
        return functions[-1]

    objective, constraint = compiled("loss", given.loss), given.constraint
    functions.append(objective)
    if constraint is not None:
        constraint = as_constraint(constraint).adapt(constrained)
    form = _Form(any(own.differs_in_training for own in functions), objective.changed)
    metrics = {}
    for name, metric in given.metrics.items():
        try:
            metrics[name] = form.metric(compiled(f"metric {name!r}", metric, test=True))
        except CannotCompile:
            if strict or form.changed:
                raise
            model = _Model(given.module)
            metrics[name] = _Function(f"metric {name!r}", metric, model, given.whole, smooth=False)
    if constraint is not None:
        constraint = constraint.adapt(lambda function, sums=False: form.value(function))
    if len(network.trainable) < len(network.params):
        kinds = Layout.of(network.params, options.get("trainable")).kinds
        wanted = zip(network.params, kinds or [""] * len(network.params), strict=True)
        trained = [n for n, kind in wanted if n in network.trainable and kind != FROZEN]
        options = options | {"trainable": trained}
    if form.changed:
        state = {name: network.buffers[name] for name in form.changed}
        options = options | {"state": state}
    return Problem(
        objective=form.objective(objective),
        clients=given.samples,
        params=network.params,
        constraint=constraint,
        test=given.test,
        metrics=metrics,
        **options,
    )


COMPARED = 10**6  # numbers of test data up to which metrics are compared with PyTorch's


@dataclasses.dataclass(frozen=True)
class _Form:
    """What functions take and return in JAX: a key if training differs, a state if it changes.

    Args:
        is_random: Whether training differs from evaluation, so that functions take a key.
        changed: The buffers that training changes.
    """

    is_random: bool
    changed: tuple[str, ...]

    def objective(self, function: Compiled) -> Callable:
        """Return the objective as a function in JAX."""
        if self.changed:
            return lambda params, data, key, state: function(params, data, key, state)
        return self.value(function)

    def value(self, function: Compiled) -> Callable:
        """Return a function in JAX that returns its value alone."""
        if self.changed:
            return lambda params, data, key, state: function(params, data, key, state)[0]
        if self.is_random:
            return lambda params, data, key: function(params, data, key)[0]
        return lambda params, data: function(params, data)[0]

    def metric(self, function: Compiled) -> Callable:
        """Return a metric in JAX."""
        if self.changed:
            return lambda params, test, state: function(params, test, None, state)[0]
        return lambda params, test: function(params, test)[0]


def _by_callback(given: _Given, options: dict[str, PyTree]) -> Problem:
    """Make a problem of functions that PyTorch computes."""
    model, samples, constraint = _Model(given.module), given.samples, given.constraint
    local = functools.partial(_Function, model=model, samples=samples, entry=given.entry)
    if constraint is not None:
        constraint = as_constraint(constraint).adapt(
            lambda function, sums=False: local("constraint", function)
        )
    return Problem(
        objective=local("loss", given.loss),
        clients=samples,
        params=model.params,
        constraint=constraint,
        test=given.test,
        metrics={
            name: _Function(f"metric {name!r}", metric, model, given.whole, smooth=False)
            for name, metric in given.metrics.items()
        },
        **options,
    )


def load(module: torch.nn.Module, params: Mapping[str, Leaf] | Run) -> torch.nn.Module:
    """Copy a result into the module.

    Args:
        module: The module that the problem was made of, or one with the same parameters.
        params: A run, for its parameters and the buffers that training changed, or parameters (and
            buffers) by name, such as `run.params`.

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
    given = params
    if isinstance(params, Run):
        given = {**params.params, **(getattr(params.state, "buffers", None) or {})}
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    needed = {name: tuple(tensor.shape) for name, tensor in _trainable(module).items()}
    known = {name: tuple(tensor.shape) for name, tensor in held.items()}
    shapes = {name: np.shape(array) for name, array in given.items()}
    wrong = {name for name, shape in shapes.items() if known.get(name) != shape}
    wrong |= needed.keys() - shapes.keys()
    if wrong:
        raise InvalidInput(
            f"params do not fit the module: names or shapes differ for {', '.join(sorted(wrong))}."
        )
    with torch.no_grad():
        for name, array in given.items():
            held[name].copy_(torch.from_numpy(np.array(array)))
    return module


def state_dict(module: torch.nn.Module, run: Run) -> dict[str, torch.Tensor]:
    """Return a run's parameters and buffers in the form of PyTorch's `state_dict`.

    Args:
        module: The module that the problem was made of; it stays as it is.
        run: The run.

    Returns:
        Tensors by name, for `module.load_state_dict` or `torch.save`.

    Raises:
        InvalidInput: If the run's parameters do not fit the module.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> import torch
        >>> net = torch.nn.Linear(1, 1)
        >>> def loss(model, x):
        ...     return model(x).pow(2).mean()
        >>> problem = fs.torch.problem(net, loss, np.ones((2, 3, 1)))
        >>> run = fs.solve(problem, fs.FedSGM(0.1), rounds=1)
        >>> sorted(fs.torch.state_dict(net, run))
        ['bias', 'weight']
    """
    return dict(load(copy.deepcopy(module), run).state_dict())


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
