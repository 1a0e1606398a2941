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

Where it cannot be done, the compiled program calls back into Python: `called` computes values and
gradients there, and `descent` takes all local steps of all clients of a cohort in one call. Padding
is removed before the call: a loss sees only its client's samples, so it is exact whatever it does
with them.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping

import jax
import numpy as np
import torch
from jaxtyping import PyTree
from numpy.typing import ArrayLike

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.layout import FROZEN, Layout
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Leaf, Samples
from fedsolve.problem.several import Parts, constraint_of
from fedsolve.problem.stacking import as_samples
from fedsolve.solving.result import Run
from fedsolve.torch.called import Called, Copies, Form, Loss, Metric, Value
from fedsolve.torch.compiled import Compiled
from fedsolve.torch.descent import callback_problem
from fedsolve.torch.export import CannotCompile
from fedsolve.torch.module import Network, as_state
from fedsolve.torch.named import is_tally, with_values
from fedsolve.torch.verify import check_function, check_rows, compare

ENTRY = "all"  # the name of data that have a mask and are no dict


def problem(
    module: torch.nn.Module,
    loss: Callable,
    clients: PyTree,
    constraint: Constraint | Callable | Parts | None = None,
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
            `Statistics` combines its sums on the server, in JAX); several in a list or a dict.
        mode: `"compiled"` (functions become JAX programs, or it is said why they cannot),
            `"callback"` (PyTorch computes them, clients in threads) or `"auto"` (compiled
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
    samples = as_samples(clients)
    entry = None
    if samples.mask is not None and not isinstance(samples.values, dict):
        entry = ENTRY  # Problem hands a mask over as one more entry of a dict
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
            said = str(reason).rstrip(".")
            raise InvalidInput(f'{said}; mode="callback" can do it.') from reason
        found = _by_callback(given, options)
        warnings.warn(f"{reason}, so PyTorch computes it in callbacks.", stacklevel=2)
        return found


MODES = ("auto", "compiled", "callback")


@dataclasses.dataclass(frozen=True)
class _Given:
    """What the user gave."""

    module: torch.nn.Module
    loss: Callable
    constraint: Constraint | Callable | Parts | None
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

    def compiled(
        name: str, function: Callable, kind: str = "value", test: bool = False
    ) -> Compiled:
        if not callable(function):
            raise InvalidInput(f"The {name} must be a function of (model, data), got {function!r}.")
        samples, entry = (given.whole, None) if test else (given.samples, given.entry)
        found = check_function(name, function, network, samples, entry, smooth=not test)
        if kind == "rows":
            check_rows(name, samples, found[0].outputs)
        own = Compiled(name, function, network, samples, entry, kind, None if test else size)
        try:
            own.look_ahead(network.params, samples, training=not test)
            if not test or sum(np.size(leaf) for leaf in jax.tree.leaves(samples)) <= COMPARED:
                compare(own, samples, found, smooth=not test)
        except CannotCompile as reason:
            raise CannotCompile(f"The {name} cannot be compiled: {reason}") from reason
        return own

    functions: list[Compiled] = []

    def constrained(function: Callable, kind: str = "value") -> Compiled:
        functions.append(compiled("constraint", function, kind))
        return functions[-1]

    def adapted(function: Callable, sums: bool = False) -> Callable:
        if is_tally(function):  # of values that are compiled already
            return function
        return constrained(function, "sums" if sums else "value")

    objective, constraint = compiled("loss", given.loss), given.constraint
    functions.append(objective)
    if constraint is not None:
        constraint = with_values(constraint_of(constraint), lambda f: constrained(f, "rows"))
        constraint = constraint.adapt(adapted)
    form = Form(any(own.differs_in_training for own in functions), objective.changed)
    metrics = {}
    for name, metric in given.metrics.items():
        try:
            found = compiled(f"metric {name!r}", metric, test=True)
        except CannotCompile:
            if strict:
                raise
            copies = Copies(network)
            found = Called(f"metric {name!r}", metric, copies, given.whole, smooth=False)
        metrics[name] = Metric(found, form)
    if constraint is not None:
        constraint = with_values(constraint, lambda function: Value(function, form))
        constraint = constraint.adapt(
            lambda function, sums=False: function if is_tally(function) else Value(function, form)
        )
    if len(network.trainable) < len(network.params):
        options = options | {"trainable": _trained(network, options.get("trainable"))}
    if form.changed:
        state = {name: as_state(network.buffers[name]) for name in form.changed}
        options = options | {"state": state}
    try:
        return Problem(
            objective=Loss(objective, form),
            clients=given.samples,
            params=network.params,
            constraint=constraint,
            test=given.test,
            metrics=metrics,
            **options,
        )
    except InvalidInput as error:
        if given.samples.mask is None:
            raise
        reason = str(error).removesuffix('; let it use data["mask"].')  # torch has no mask
        raise CannotCompile(reason) from error


def _trained(network: Network, trainable: PyTree) -> list[str]:
    """Return the names of the parameters that need a gradient and are among the user's choice."""
    kinds = Layout.of(network.params, trainable).kinds
    named = zip(network.params, kinds or [""] * len(network.params), strict=True)
    return [name for name, kind in named if name in network.trainable and kind != FROZEN]


COMPARED = 10**6  # numbers of test data up to which metrics are compared with PyTorch's


def _by_callback(given: _Given, options: dict[str, PyTree]) -> Problem:
    """Make a problem of functions that PyTorch computes."""
    return callback_problem(
        given.module,
        given.loss,
        given.constraint,
        given.samples,
        given.entry,
        given.test,
        given.metrics,
        options,
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
    given: Mapping[str, PyTree] = params if isinstance(params, Mapping) else {}
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
