"""Problems whose model is a Flax NNX module: `problem` makes one, `load` copies a result back.

A module is its parameters (`nnx.Param`), its state (running statistics and all other variables),
keys of its random numbers, and a graph. `Problem` has the first two as nested dicts, by the names
of the module's attributes; keys follow from that of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_kind
from fedsolve.problem.constraints import Constraint, as_constraint
from fedsolve.problem.problem import Problem
from fedsolve.solving.result import Run
from fedsolve.types import Function, PRNGKey, PyTree

try:
    from flax import nnx  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ImportError("fedsolve.nnx needs Flax: pip install flax.") from error


def problem(
    module: object,
    loss: object,
    clients: PyTree,
    constraint: Constraint | Function | None = None,
    *,
    test: PyTree = None,
    metrics: Mapping[str, Function] | None = None,
    representation: Function | None = None,
    **options: Any,
) -> Problem:
    """Make a `Problem` whose parameters are the module's `nnx.Param`s.

    The module is taken as it is now, and never changed. In local steps it is in the mode that it is
    given in (so dropout drops, and batch normalisation uses the batch, unless `module.eval()` was
    called), and its random numbers follow from the step's key. In evaluation it is in evaluation
    mode. Variables other than parameters, such as running statistics, are the problem's `state`;
    `buffers` says what becomes of them.

    Args:
        module: The module.
        loss: f_j, a function of (model, one client's data) that returns a scalar.
        clients: All clients' data as for `Problem`.
        constraint: g_j in the form of `loss`, or a `Constraint` made of such functions.
        test: Data for the metrics.
        metrics: Functions of (model, test), by name.
        representation: Function of (model, one client's data) that returns a row for each sample.
        **options: Other arguments of `Problem`; names for `trainable` and `personal` are those of
            attributes, such as `layers.0.kernel`.

    Returns:
        The problem.

    Raises:
        InvalidInput: If the module has no parameters, or `Problem` cannot be made of it.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from flax import nnx
        >>> class Net(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.norm = nnx.BatchNorm(3, rngs=rngs)
        ...         self.out = nnx.Linear(3, 1, rngs=rngs)
        ...     def __call__(self, x):
        ...         return self.out(self.norm(x))[:, 0]
        >>> def loss(model, data):
        ...     return jnp.mean((model(data["x"]) - data["y"]) ** 2)
        >>> data = {"x": np.ones((4, 6, 3)), "y": np.zeros((4, 6))}
        >>> problem = fs.nnx.problem(Net(nnx.Rngs(0)), loss, data)
        >>> problem.dimension, sorted(problem.state["norm"])
        (10, ['mean', 'var'])
    """
    check_kind("module", module, nnx.Module)
    model = _Model(module)

    def local(function: PyTree, *, moves: bool = False, name: str = "constraint") -> Any:
        if not callable(function):
            raise InvalidInput(f"The {name} must be a function of (model, data), got {function!r}.")
        return model.function(function, moves)

    if constraint is not None:
        constraint = as_constraint(constraint).adapt(lambda function, sums=False: local(function))
    return Problem(
        objective=local(loss, moves=True, name="loss"),
        clients=clients,
        params=model.params,
        constraint=constraint,
        test=test,
        metrics={name: model.in_evaluation(metric) for name, metric in (metrics or {}).items()},
        representation=None if representation is None else model.in_evaluation(representation),
        state=model.state,
        **options,
    )


def load(module: object, params: PyTree, state: PyTree = None) -> Any:
    """Copy a result into the module.

    Args:
        module: The module that the problem was made of, or one with the same variables.
        params: A run, for its parameters and the state that the server has; or parameters alone,
            such as `run.params`.
        state: Other variables; those of the module stay if None.

    Returns:
        The same module.

    Raises:
        InvalidInput: If names or shapes do not fit the module.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> from flax import nnx
        >>> params = {"bias": np.zeros(1), "kernel": np.array([[1.0], [2.0]])}
        >>> net = fs.nnx.load(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), params)
        >>> net(jnp.ones(2)).tolist()
        [3.0]
    """
    check_kind("module", module, nnx.Module)
    if isinstance(params, Run):
        params, state = params.params, params.buffers
    _, own_params, _, _, own_state = _split(module)
    for name, own, given in (("params", own_params, params), ("state", own_state, state)):
        if given is None:
            continue
        shapes = [
            {jax.tree_util.keystr(p): np.shape(leaf) for p, leaf in jax.tree.leaves_with_path(tree)}
            for tree in (nnx.to_pure_dict(own), given)
        ]
        if shapes[0] != shapes[1]:
            differ = sorted(
                k for k in {**shapes[0], **shapes[1]} if shapes[0].get(k) != shapes[1].get(k)
            )
            raise InvalidInput(
                f"{name} do not fit the module: names or shapes differ for {', '.join(differ)}."
            )
        nnx.replace_by_pure_dict(own, jax.tree.map(jnp.asarray, given))
        nnx.update(module, own)
    return module


class _Model:
    """The parts of a module, and functions of them."""

    def __init__(self, module: nnx.Module):
        self._graph, self._params, self._keys, self._sown, self._state = _split(module)
        self.name = type(module).__name__
        resting = nnx.clone(module)
        resting.eval()
        self._resting = nnx.graphdef(resting)
        self.params = _arrays(self._params)
        self.state = _arrays(self._state) or None
        if not jax.tree.leaves(self.params):
            raise InvalidInput("The module has no parameters (nnx.Param).")

    def at(self, params: PyTree, state: PyTree, key: PRNGKey | None) -> nnx.Module:
        """Return the module; with a key as in local steps, without one as in evaluation."""
        own_params, own_state = _filled(self._params, params), _filled(self._state, state)
        keys = self._keys if key is None else _reseeded(self._keys, key)
        graph = self._resting if key is None else self._graph
        return nnx.merge(graph, own_params, keys, self._sown, own_state)

    def function(self, function: Function, moves: bool) -> Function:
        """Return a function of (model, data) as one of (params, data, key, state), as in `Problem`.

        If `moves`, it returns the next state, too.
        """

        def plain(params: PyTree, data: PyTree, key: PRNGKey | None) -> PyTree:
            return function(self.at(params, None, key), data)

        def with_state(params: PyTree, data: PyTree, key: PRNGKey | None, state: PyTree) -> PyTree:
            module = self.at(params, state, key)
            value = function(module, data)
            return (value, nnx.to_pure_dict(_split(module)[-1])) if moves else value

        found = plain if self.state is None else with_state
        found.model_name = self.name  # type: ignore[attr-defined]
        return found

    def in_evaluation(self, function: Function) -> Function:
        """Return a function of (model, data) as one of (params, data, state), without a key."""
        if self.state is None:
            return lambda params, data: function(self.at(params, None, None), data)
        return lambda params, data, state: function(self.at(params, state, None), data)


def _split(module: nnx.Module) -> tuple[Any, ...]:
    """Return graph, parameters, keys of random numbers, sown values and all other variables."""
    return nnx.split(module, nnx.Param, nnx.RngState, nnx.Intermediate, ...)


def _arrays(state: PyTree) -> dict[str, PyTree]:
    """Return variables as nested dicts of NumPy arrays."""
    return jax.tree.map(np.asarray, nnx.to_pure_dict(state))


def _filled(template: PyTree, values: PyTree) -> PyTree:
    """Return variables with other values."""
    if values is None:
        return template
    filled = jax.tree.map(lambda leaf: leaf, template)  # a copy: the template stays as it is
    nnx.replace_by_pure_dict(filled, values)
    return filled


def _reseeded(keys: PyTree, key: PRNGKey) -> PyTree:
    """Return the keys of a module's random numbers for a step: counted from 0, from this key."""
    leaves, structure = jax.tree.flatten(keys)
    fresh = []
    for position, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            own = jax.random.fold_in(key, position)
            fresh.append(jax.random.split(own, leaf.shape) if leaf.shape else own)
        else:
            fresh.append(jnp.zeros_like(leaf))
    return jax.tree.unflatten(structure, fresh)
