"""What is to be solved.

    minimise f(w) = (1/n) Σ_j f_j(w)   subject to   g(w) ≤ 0,   w in X.

Problems and models see parameters in their own structure; algorithms see one flat vector w.
`Problem` converts between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.problem.client import Client
from fedsolve.problem.constraints import Constraint, as_constraint
from fedsolve.problem.domains import Domain, WholeSpace
from fedsolve.problem.layout import Layout, as_device_array, is_parameter
from fedsolve.problem.padding import per_client
from fedsolve.problem.samples import Samples
from fedsolve.problem.stacking import as_samples, pool
from fedsolve.types import PRNGKey, PyTree, Vector


class Problem(eqx.Module):
    """A federated optimization problem.

    Args:
        objective: f_j, a function of (params, one client's data) that returns a scalar.
        clients: All clients' data; every leaf has a leading client axis. `stack_clients` makes it
            from clients of different sizes.
        params: The initial parameters, in any structure of floating-point arrays.
        constraint: g_j in the same form as `objective`, or a `Constraint`; None for none.
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

    objective: Callable = eqx.field(static=True)
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

    def __init__(
        self,
        objective: Callable[..., Any],
        clients: PyTree,
        params: PyTree,
        constraint: Constraint | Callable[..., Any] | None = None,
        domain: Domain | Callable[..., Any] = WholeSpace(),  # noqa: B008 (immutable)
        batch_size: int | None = None,
        test: PyTree = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        optimum: float | int | None = None,
        validation: PyTree = None,
        representation: Callable[..., Any] | None = None,
    ):
        samples = as_samples(clients)
        _check_clients(samples)
        _check_params(params)
        if batch_size is not None:
            check_count("batch_size", batch_size)
        self.objective = _checked("objective", objective, params, samples)
        self.given = objective, constraint
        self.samples = samples
        self.params = params
        self.constraint = None
        if constraint is not None:
            self.constraint = as_constraint(constraint).adapt(
                lambda function, sums=False: _checked("constraint", function, params, samples, sums)
            )
        self.domain = domain
        self.test = test
        self.validation = validation
        self.representation = representation
        self.metrics = tuple((metrics or {}).items())
        self.batch_size = batch_size
        self.layout = Layout.of(params)
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
        return self.layout.ravel(self.domain(self.layout.unravel(w)))

    def value(self, w: Vector, samples: Samples) -> Float[Array, ""]:
        """Compute f_j(w).

        Args:
            w: Where to evaluate.
            samples: The samples of one client.

        Returns:
            The value, a scalar.
        """
        return self.objective(self.layout.unravel(w), samples)

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
        """Return what one client keeps before the first round; by default nothing."""
        return None

    def values(self, w: Vector, samples: Samples, key: PRNGKey | None) -> dict[str, PyTree]:
        """Evaluate one client.

        Args:
            w: Where to evaluate.
            samples: All samples of the client.
            key: Key of this evaluation and this client, for problems that draw their samples.

        Returns:
            `"objective"`, which is f_j(w), and `"constraint"`, what the client would send about g,
            if there is a constraint. Other entries (scalars) are averaged over clients for the
            history.
        """
        params = self.layout.unravel(w)
        found = {"objective": self.objective(params, samples)}
        if self.constraint is not None:
            found["constraint"] = self.constraint.measure(params, samples, 1)
        return found

    def with_clients(self, clients: PyTree) -> Problem:
        """Return the same problem over other clients.

        Args:
            clients: All clients' data, as for the constructor.

        Returns:
            The new problem; its optimum is not known.
        """
        objective, constraint = self.given
        options = {"batch_size": self.batch_size, "test": self.test, "metrics": dict(self.metrics)}
        options |= {"validation": self.validation, "representation": self.representation}
        return Problem(objective, clients, self.params, constraint, self.domain, **options)

    def pooled(self) -> Problem:
        """Return the same problem with all samples on one client, for centralized training.

        f is then the mean over all samples, not over clients.
        """
        return self.with_clients(pool(self.samples))

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


def _checked(
    name: str, function: Callable[..., Any], params: PyTree, samples: Samples, sums: bool = False
) -> Callable[..., Any]:
    """Return a user's function made exact on padded samples; raise if it returns no scalar."""
    if not callable(function):
        raise InvalidInput(f"The {name} must be a function of (params, data), got {function!r}.")
    try:
        exact = per_client(name, function, params, samples, sums)
        one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), samples)
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


def _check_params(params: PyTree) -> None:
    """Raise if there are no parameters, or they are not finite floating-point numbers."""
    if Layout.of(params).size == 0:
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
