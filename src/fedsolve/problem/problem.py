"""What is to be solved, and what a client sees of it.

    minimise f(w) = (1/n) Σ_j f_j(w)   subject to   g(w) ≤ 0,   w in X.

Problems and models see parameters in their own structure; algorithms see one flat vector w. The two
meet here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.problem.client import Client
from fedsolve.problem.constraints import Constraint, as_constraint
from fedsolve.problem.domains import Domain, WholeSpace
from fedsolve.problem.layout import Layout, as_device_array, is_parameter
from fedsolve.problem.samples import Samples, as_samples, per_client, pool


class Problem(eqx.Module):
    """A federated optimization problem.

    - `objective(params, data)`: f_j, a scalar, of parameters and one client's data.
    - `clients`: all clients' data; every leaf has a leading client axis (`stack_clients` makes it
      from clients of different sizes).
    - `params`: where to start, in any structure of floating-point arrays.
    - `constraint`: g_j in the same form as `objective`, or a `Constraint`; None for none.
    - `domain`: X, as a `Domain` or as a function that projects parameters onto it.
    - `batch_size`: clients' gradients and constraint values come from that many samples, drawn
      anew each time; None for all of them. Evaluation always uses all.
    - `metrics`, `test`: functions of (params, test) to follow during a run, by name.
    - `optimum`: f*, the least objective under the constraint, where it is known.
    - `validation`: data that the server holds, in the form of one client's data, for those who
      weigh clients by it.
    - `representation(params, data)`: a row for each sample, such as the output of a network's last
      hidden layer, for those who compare models by it.
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
        objective: Callable,
        clients: PyTree,
        params: PyTree,
        constraint: Constraint | Callable | None = None,
        domain: Domain | Callable = WholeSpace(),  # noqa: B008 (immutable)
        batch_size: int | None = None,
        test: PyTree = None,
        metrics: Mapping[str, Callable] | None = None,
        optimum: float | int | None = None,
        validation: PyTree = None,
        representation: Callable | None = None,
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
    def size(self) -> int:
        """The number of parameters, d."""
        return self.layout.size

    def start(self) -> Float[Array, " d"]:
        """The initial parameters as a vector."""
        return self.layout.ravel(self.params)

    def project(self, w: Float[Array, " d"]) -> Float[Array, " d"]:
        """Π_X."""
        if isinstance(self.domain, Domain):
            return self.domain.project(w)
        return self.layout.ravel(self.domain(self.layout.unravel(w)))

    def value(self, w: Float[Array, " d"], samples: Samples) -> Float[Array, ""]:
        """f_j(w) on those samples."""
        return self.objective(self.layout.unravel(w), samples)

    def validate(self, w: Float[Array, " d"]) -> Float[Array, ""]:
        """The objective on the data that the server holds."""
        return self.value(w, Samples(self.validation))

    # What a problem says for itself where its functions f_j and g_j alone do not say it

    def client(self, *seen: Any) -> Client:
        """What a client method sees, from what `Client` takes after the problem. A problem with
        clients of its own kind makes them here."""
        return Client(self, *seen)

    def init_memory(self) -> PyTree:
        """What one client remembers before the first round; by default nothing."""
        return None

    def values(self, w: Float[Array, " d"], samples: Samples, key: Any) -> dict[str, PyTree]:
        """At an evaluation, for one client: f_j(w) from all of its samples, and what it would send
        about g. Where they must be drawn, `key` is this evaluation's and this client's own.

        What else is found here (scalars, by name) is averaged over clients for the history.
        """
        params = self.layout.unravel(w)
        found = {"objective": self.objective(params, samples)}
        if self.constraint is not None:
            found["constraint"] = self.constraint.measure(params, samples, 1)
        return found

    def with_clients(self, clients: PyTree) -> Problem:
        """The same problem over other clients."""
        objective, constraint = self.given
        options = {"batch_size": self.batch_size, "test": self.test, "metrics": dict(self.metrics)}
        options |= {"validation": self.validation, "representation": self.representation}
        return Problem(objective, clients, self.params, constraint, self.domain, **options)

    def pooled(self) -> Problem:
        """The same problem with all samples in one place: centralized training is an algorithm's
        run on it. f is then the mean over all samples, not over clients."""
        return self.with_clients(pool(self.samples))

    def on_device(self, dtype: Any = None) -> Problem:
        """The same problem with its arrays on JAX's device, floating ones in `dtype` if given."""
        return as_device_array(self, dtype)

    def on_host(self, dtype: Any = None) -> Problem:
        """The same with NumPy arrays, of the types that JAX would give them."""

        def cast(leaf: Any, dtype: Any = None) -> np.ndarray:
            return np.asarray(leaf, jax.dtypes.canonicalize_dtype(dtype or jnp.result_type(leaf)))

        return as_device_array(self, dtype, cast)


def _checked(
    name: str, function: Callable, params: PyTree, samples: Samples, sums: bool = False
) -> Callable:
    """The function made exact on padded samples, after a look at what it returns."""
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
            # in blocks: flags of all values at once would be a quarter of the data
            step = max(2**20 * len(leaf) // np.size(leaf), 1)
            for first in range(0, len(leaf), step):
                block = np.isfinite(np.asarray(leaf[first : first + step]))
                finite = block.reshape(len(block), -1).all(axis=1)
                if not finite.all():
                    client = first + np.argmin(finite)
                    raise InvalidInput(f"{name} of client {client} has a NaN or infinity.")
    for path, mask in jax.tree.leaves_with_path(samples.mask):
        some = np.asarray(mask).any(axis=1)
        if not some.all():
            name = jax.tree_util.keystr(path) or "its data"
            raise InvalidInput(f"Client {np.argmin(some)} has no samples in {name}.")
