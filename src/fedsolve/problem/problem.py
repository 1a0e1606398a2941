"""What is to be solved.

    minimise f(w) = (1/n) Σ_j f_j(w)   subject to   g(w) ≤ 0,   w in X.

Problems and models see parameters in their own structure; algorithms see one flat vector w.
`Problem` converts between the two.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count, html_table
from fedsolve.problem.client import Client
from fedsolve.problem.columns import check_columns
from fedsolve.problem.constraints import Constraint
from fedsolve.problem.domains import Domain, WholeSpace
from fedsolve.problem.layout import PERSONAL, Layout, Which, as_device_array, is_parameter
from fedsolve.problem.local_pass import HasLocalPass
from fedsolve.problem.padding import PerClient, per_client
from fedsolve.problem.samples import Samples, full_mask
from fedsolve.problem.several import Parts, constraint_of
from fedsolve.problem.stacking import as_samples, pool
from fedsolve.types import Function, Personal, PRNGKey, PyTree, Vector

BUFFERS = ("average", "local", "frozen")


class Kept(NamedTuple):
    """What a client keeps of the model: its personal parameters, and a state of its own."""

    personal: Personal | None
    state: PyTree


class Problem(eqx.Module):
    """A federated optimization problem.

    A loss that draws random numbers (dropout, augmentation, noise) takes a third argument `key`:
    local steps give it a JAX key that follows from seed, round, exchange, client and step, and
    evaluation gives None. A loss with a `state` (running statistics) takes one more argument and
    returns (value, next state); it moves in local steps only.

    Args:
        objective: f_j, a function of (params, one client's data) that returns a scalar; with a
            third argument `key` if it is random, and with `state` if there is one.
        clients: All clients' data; every leaf has a leading client axis. Or a list with the data of
            each client, which may differ in size: dicts or tuples of arrays, PyTorch datasets or
            loaders, pandas tables.
        params: The initial parameters, in any structure of floating-point arrays.
        constraint: g_j in the same form as `objective`, or a `Constraint`; a list or a dict of them
            for several (see `Several`); None for none.
        domain: X, as a `Domain` or as a function that projects parameters onto it.
        batch_size: The number of samples from which a client's gradients and constraint values are
            computed, drawn anew each time; None for all of them. Evaluation always uses all.
        test: Data for the metrics.
        metrics: Functions of (params, test) to record during a run, by name.
        optimum: f*, the least objective under the constraint, if it is known.
        validation: Data that the server holds, in the form of one client's data, for weighting
            rules that use it.
        representation: Function of (params, one client's data) that returns a row for each sample,
            such as the output of a network's last hidden layer, for algorithms that compare models
            by it.
        drop_last: Whether passes of `local_epochs` leave out a last batch that is not full.
        state: What the loss keeps besides parameters, in any structure of arrays, such as the
            running statistics of batch normalisation; None for nothing. Then `objective` is a
            function of (params, data, state) or (params, data, key, state) that returns (value,
            next state); constraint, metrics and `representation` take `state` as their last
            argument and return only their value.
        buffers: What becomes of the clients' next states: `"average"` (the server averages them,
            with the weights of the replies), `"local"` (each client keeps its own, as FedBN does)
            or `"frozen"` (the state stays as it is).
        trainable: Which parameters are trained: a list of names, or first parts of dotted names
            (`["head"]`), or a function of (name, value); None for all. The others are given to the
            functions as they are, and neither sent nor counted.
        personal: Which parameters stay on the clients, each of which trains its own, in the form of
            `trainable`; None for none.

    Raises:
        InvalidInput: If the data or parameters are empty, of the wrong type or not finite, or if a
            function fails on one client's data, does not return a scalar, or would be changed by
            padding.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> def loss(w, data):
        ...     return 0.5 * jnp.mean((data["x"] @ w - data["y"]) ** 2)
        >>> data = {"x": np.ones((4, 6, 3)), "y": np.zeros((4, 6))}
        >>> problem = fs.Problem(loss, data, params=np.zeros(3), domain=fs.Ball(1.0))
        >>> problem.n, problem.dimension
        (4, 3)
    """

    objective: PerClient = eqx.field(static=True)
    samples: Samples
    params: PyTree
    constraint: Constraint | None
    domain: Domain | Callable
    test: PyTree
    validation: PyTree
    representation: Callable | None = eqx.field(static=True)
    metrics: tuple[tuple[str, Callable], ...] = eqx.field(static=True)
    batch_size: int | None = eqx.field(static=True)
    layout: Layout = eqx.field(static=True)
    optimum: float | None = eqx.field(static=True)
    given: tuple[Callable, Constraint | Callable | None]  # objective and constraint as written
    drop_last: bool = eqx.field(static=True)
    state: PyTree
    buffers: str = eqx.field(static=True)
    chosen: tuple[Which, Which] = eqx.field(static=True)  # trainable and personal, as given

    def __init__(
        self,
        objective: Function,
        clients: PyTree,
        params: PyTree,
        constraint: Constraint | Function | Parts | None = None,
        domain: Domain | Function = WholeSpace(),  # noqa: B008 (immutable)
        batch_size: int | None = None,
        test: PyTree = None,
        metrics: Mapping[str, Function] | None = None,
        optimum: float | int | None = None,
        validation: PyTree = None,
        representation: Function | None = None,
        drop_last: bool = False,
        state: PyTree = None,
        buffers: str = "average",
        trainable: object = None,
        personal: object = None,
    ):
        samples = as_samples(clients)
        _check_clients(samples)
        _check_params(params)
        if batch_size is not None:
            check_count("batch_size", batch_size)
        if drop_last and batch_size is None:
            raise InvalidInput("drop_last is about minibatches: give batch_size, too.")
        if buffers not in BUFFERS:
            raise InvalidInput(f"buffers must be one of {', '.join(BUFFERS)}, got {buffers!r}.")
        self.drop_last, self.buffers = bool(drop_last), buffers
        self.state = state
        self.chosen = _fixed(trainable), _fixed(personal)
        self.layout = Layout.of(params, *self.chosen)
        if self.layout.size == 0:
            raise InvalidInput("No parameter is trained on the server: all are fixed or personal.")
        checked = functools.partial(_checked, params=params, samples=samples, state=self.state)
        self.objective = checked("objective", objective, moves=True)
        self.samples = samples
        self.params = params
        self.constraint = None
        if constraint is not None:
            fitted = constraint_of(constraint).fitted(samples)
            constraint = constraint if callable(constraint) else fitted
            self.constraint = fitted.adapt(
                lambda function, sums=False: checked("constraint", function, sums=sums)
            )
        self.given = objective, constraint
        self.domain = domain
        self.test = test
        self.validation = validation
        self.representation = representation
        self.metrics = tuple((metrics or {}).items())
        self.batch_size = batch_size
        if self.keeps_own and metrics:
            raise InvalidInput(
                "Metrics on common test data need one model for all clients: with personal "
                'parameters or buffers="local" there is none.'
            )
        if optimum is not None and not np.isfinite(optimum):
            raise InvalidInput(f"optimum is the least value of the objective, got {optimum}.")
        self.optimum = None if optimum is None else float(optimum)

    @property
    def n(self) -> int:
        """The number of clients."""
        return jax.tree.leaves(self.samples)[0].shape[0]

    @property
    def dimension(self) -> int:
        """The number of parameters, d."""
        return self.layout.size

    @property
    def size(self) -> int:
        """An alias of `dimension`, kept for this version."""
        return self.dimension

    def start(self) -> Vector:
        """Return the initial parameters as a vector."""
        return self.layout.ravel(self.params)

    def project(self, w: Vector) -> Vector:
        """Compute Π_X(w).

        Args:
            w: A point.

        Returns:
            The nearest point of X.
        """
        if isinstance(self.domain, Domain):
            return self.domain.project(w)
        return self.layout.ravel(self.domain(self.params_at(w)))

    def params_at(
        self,
        w: Float[Array | np.ndarray, " d"],
        personal: Float[Array | np.ndarray, " p"] | None = None,
    ) -> PyTree:
        """Return parameters in their own structure.

        Args:
            w: The parameters that clients share, as a vector.
            personal: A client's personal parameters, as a vector; by default the initial ones.

        Returns:
            The parameters, with the ones that are not trained as they were given.
        """
        if self.layout.kinds is None:
            return self.layout.unravel(w)
        if personal is None and self.layout.personal_size:
            personal = self.layout.ravel(self.params, PERSONAL)
        return self.layout.unravel(w, personal, self.layout.frozen(self.params))

    def value(self, w: Vector, samples: Samples, kept: Kept | None = None) -> Float[Array, ""]:
        """Compute f_j(w).

        Args:
            w: Where to evaluate.
            samples: The samples of one client.
            kept: What the client keeps; by default as it begins.

        Returns:
            The value, a scalar.
        """
        return self.objective(self._params(w, kept), self.with_own_state(samples, kept))

    def validate(self, w: Vector) -> Float[Array, ""]:
        """Compute the objective on the data that the server holds.

        Args:
            w: Where to evaluate.

        Returns:
            The value, a scalar.
        """
        return self.value(w, Samples(self.validation))

    # For subclasses whose functions f_j and g_j alone do not describe the problem

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
        """Make the client that a client method sees.

        Override it in a problem whose clients are of a subclass of `Client`.

        Args:
            samples: The client's samples.
            w: The parameters that every client holds.
            round: The round, counted from 0.
            index: The client's index.
            key: The client's key in this exchange.
            memory: What the client keeps between rounds.

        Returns:
            The client.
        """
        return Client(self, samples, w, round, index, key, memory)

    def init_memory(self) -> PyTree:
        """Return what one client keeps before the first round.

        Those are its personal parameters and a state of its own, as `Kept`; by default nothing.
        """
        if not self.keeps_own:
            return None
        personal = self.layout.ravel(self.params, PERSONAL) if self.layout.personal_size else None
        return Kept(personal, self.state if self.buffers == "local" else None)

    def values(
        self, w: Vector, samples: Samples, key: PRNGKey | None, kept: Kept | None = None
    ) -> dict[str, PyTree]:
        """Evaluate one client.

        Args:
            w: Where to evaluate.
            samples: All samples of the client.
            key: Key of this evaluation and this client, for problems that draw their samples.
            kept: What the client keeps, where clients keep parts of the model.

        Returns:
            `"objective"`, which is f_j(w), and `"constraint"`, what the client would send about g,
            if there is a constraint. Other entries (scalars) are averaged over clients for the
            history.
        """
        params, samples = self._params(w, kept), self.with_own_state(samples, kept)
        found = {"objective": self.objective(params, samples)}
        if self.constraint is not None:
            found["constraint"] = self.constraint.measure(params, samples, 1)
        return found

    def _repr_html_(self) -> str:
        """Return clients, parameters and constraint."""
        objective = self.given[0]
        name = getattr(objective, "__name__", type(objective).__name__)
        rows = {"clients": str(self.n), "parameters": str(self.dimension), "objective": name}
        bound = self.constraint
        rows["constraint"] = "none" if bound is None else type(bound).__name__
        return html_table(type(self).__name__, rows, "")

    def with_clients(self, clients: PyTree) -> Problem:
        """Return the same problem over other clients.

        Args:
            clients: All clients' data, as for the constructor.

        Returns:
            The new problem; its optimum is not known.
        """
        return self._made(self.given[0], clients)

    def with_objective(self, objective: Function) -> Problem:
        """Return the same problem with another objective.

        Args:
            objective: The objective, as for the constructor.

        Returns:
            The new problem; its optimum is not known.
        """
        return self._made(objective, self.samples)

    def _made(self, objective: Function, clients: PyTree) -> Problem:
        options = {"batch_size": self.batch_size, "test": self.test, "metrics": dict(self.metrics)}
        options |= {"validation": self.validation, "representation": self.representation}
        options |= {"drop_last": self.drop_last, "state": self.state, "buffers": self.buffers}
        options |= {"trainable": self.chosen[0], "personal": self.chosen[1]}
        return Problem(objective, clients, self.params, self.given[1], self.domain, **options)

    def pooled(self) -> Problem:
        """Return the same problem with all samples on one client, for centralized training.

        f is then the mean over all samples, not over clients.
        """
        return self.with_clients(pool(self.samples))

    # Parts of the model that are not parameters on the server

    @property
    def trains_itself(self) -> bool:
        """Whether the objective brings a training loop in place of single local steps."""
        objective = self.objective.function
        return isinstance(objective, HasLocalPass) and objective.trains_itself

    @property
    def keeps_own(self) -> bool:
        """Whether clients keep parts of the model: personal parameters, or their own state."""
        return self.layout.personal_size > 0 or self.keeps_state

    @property
    def keeps_state(self) -> bool:
        """Whether each client keeps a state of its own."""
        return self.state is not None and self.buffers == "local"

    @property
    def averages_state(self) -> bool:
        """Whether the server averages the clients' states."""
        return self.state is not None and self.buffers == "average"

    def with_state(self, state: PyTree) -> Problem:
        """Return the same problem with another state.

        Args:
            state: The state, of the structure of the present one.

        Returns:
            The problem.
        """
        return eqx.tree_at(lambda p: p.state, self, state, is_leaf=lambda node: node is None)

    def _params(self, w: Vector, kept: Kept | None) -> PyTree:
        return self.params_at(w, None if kept is None else kept.personal)

    def with_own_state(self, samples: Samples, kept: Kept | None = None) -> Samples:
        """Return the samples with the state for the loss, if there is one and they have none."""
        if self.state is None or samples.state is not None:
            return samples
        own = self.state if kept is None or kept.state is None else kept.state
        return dataclasses.replace(samples, state=own)

    def on_device(self, dtype: DTypeLike | None = None) -> Problem:
        """Return the same problem with its arrays on JAX's device.

        Args:
            dtype: The type of floating-point arrays; JAX's default if None.

        Returns:
            The problem with JAX arrays.
        """
        return as_device_array(self, dtype)

    def on_host(self, dtype: DTypeLike | None = None) -> Problem:
        """Return the same problem with NumPy arrays, of the types that JAX would give them.

        Args:
            dtype: The type of floating-point arrays; JAX's default if None.

        Returns:
            The problem with NumPy arrays.
        """

        def cast(leaf: PyTree, dtype: DTypeLike | None = None) -> np.ndarray:
            return np.asarray(leaf, jax.dtypes.canonicalize_dtype(dtype or jnp.result_type(leaf)))

        return as_device_array(self, dtype, cast)


def _fixed(which: object) -> Any:
    """Return the choice of parameters as a value that can be part of a compiled program."""
    return tuple(which) if isinstance(which, list) else which


def _checked(
    name: str,
    function: Function,
    params: PyTree,
    samples: Samples,
    sums: bool = False,
    state: PyTree = None,
    moves: bool = False,
) -> PerClient:
    """Return a user's function made exact on padded samples; raise if it returns no scalar."""
    if not callable(function):
        raise InvalidInput(f"The {name} must be a function of (params, data), got {function!r}.")
    check_columns(name, function, params, samples.values)
    try:
        exact = per_client(name, function, params, samples, sums, state, moves)
        one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), samples)
        if exact.returns_state:
            _check_state(name, exact, params, dataclasses.replace(one, state=state))
        one = dataclasses.replace(one, state=state)
        value = eqx.filter_eval_shape(exact, as_device_array(params), one)
    except InvalidInput:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise InvalidInput(
            f"The {name} failed on one client's data: {type(error).__name__}"
            f"{': ' + reason[0] if reason else ''}"
        ) from error
    if not sums and getattr(value, "shape", None) != ():
        got = f"shape {value.shape}" if hasattr(value, "shape") else type(value).__name__
        raise InvalidInput(f"The {name} must return a scalar for one client, got {got}.")
    return exact


def _check_state(name: str, exact: PerClient, params: PyTree, one: Samples) -> None:
    """Raise if the function does not return a value and a state of the same form."""
    bare = dataclasses.replace(one, mask=None)
    data = {**bare.values, "mask": full_mask(one)} if exact.sees_mask else bare.values
    extra = ((None,) if exact.is_random else ()) + (one.state,)
    found = eqx.filter_eval_shape(exact.function, as_device_array(params), data, *extra)
    if not isinstance(found, tuple) or len(found) != 2:
        raise InvalidInput(f"With a state, the {name} must return (value, next state).")
    kinds = [
        (
            jax.tree.structure(tree),
            [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(tree)],
        )
        for tree in (one.state, found[1])
    ]
    if kinds[0] != kinds[1]:
        raise InvalidInput(
            f"The {name} returns a state that differs from the given one in structure, shape or "
            "type."
        )


def _check_params(params: PyTree) -> None:
    """Raise if there are no parameters, or they are not finite floating-point numbers."""
    if Layout.of(params).size == 0:
        kinds = {str(jnp.result_type(leaf)) for leaf in jax.tree.leaves(params) if np.size(leaf)}
        if kinds & {"int32", "int64"}:
            raise InvalidInput("params are integers; parameters are floating-point numbers.")
        raise InvalidInput("params is empty: it has no floating-point arrays to optimise.")
    for path, leaf in jax.tree.leaves_with_path(params):
        name = "params" + jax.tree_util.keystr(path)
        if is_parameter(leaf):
            if not np.all(np.isfinite(np.asarray(leaf))):
                raise InvalidInput(f"{name} has a value that is not finite.")
        elif eqx.is_array(leaf) or isinstance(leaf, np.ndarray):
            raise InvalidInput(f"{name} is {leaf.dtype}; parameters are floating-point numbers.")


def _check_clients(samples: Samples) -> None:
    """Raise if clients differ in number between arrays, or one has no samples or none finite."""
    leaves = [
        ("clients" + jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree.leaves_with_path(samples.values)
    ]
    if not leaves:
        raise InvalidInput("There are no clients: their data are empty.")
    first, count = leaves[0][0], None
    for name, leaf in leaves:
        kind = getattr(leaf, "dtype", None)
        if isinstance(kind, np.dtype) and kind.kind in "OSUMm":  # objects, texts, dates
            raise InvalidInput(f"{name} is of type {kind}; data are numbers: encode it.")
        if np.ndim(leaf) == 0:
            raise InvalidInput(f"{name} is a scalar; every leaf needs a leading client axis.")
        count = len(leaf) if count is None else count
        if len(leaf) != count:
            raise InvalidInput(
                f"The leading axes differ: {first} has {count} clients, {name} has {len(leaf)}."
            )
        if np.size(leaf) == 0:
            raise InvalidInput(f"{name} is empty (shape {np.shape(leaf)}): clients need samples.")
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            _check_finite(name, leaf)
    for path, mask in jax.tree.leaves_with_path(samples.mask):
        some = np.asarray(mask).any(axis=1)
        if not some.all():
            name = jax.tree_util.keystr(path) or "its data"
            raise InvalidInput(f"Client {np.argmin(some)} has no samples in {name}.")


def _check_finite(name: str, leaf: Float[Array, "n ..."] | Float[np.ndarray, "n ..."]) -> None:
    """Raise if a client's values are not all finite."""
    # in blocks: flags of all values at once would be a quarter of the data
    step = max(2**20 * len(leaf) // np.size(leaf), 1)
    for first in range(0, len(leaf), step):
        block = np.isfinite(np.asarray(leaf[first : first + step]))
        finite = block.reshape(len(block), -1).all(axis=1)
        if not finite.all():
            client = first + np.argmin(finite)
            raise InvalidInput(f"{name} of client {client} has a NaN or infinity.")
