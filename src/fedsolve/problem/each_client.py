"""A constraint that every client, or a share of the clients, must satisfy by itself."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.problem.constraints import Constraint, Exact, Scale, Weights, as_constraint
from fedsolve.problem.samples import Samples
from fedsolve.types import Function, PyTree


class Active(NamedTuple):
    """Which clients descend their own g_j, by its value: those from `least` to `most`."""

    least: Float[Array, ""]
    most: Float[Array, ""]
    factor: Float[Array, ""]  # clients heard for each active one


class EachClient(Constraint):
    """The constraint g_j(w) ≤ 0 for every client j, or for a share of the clients.

    g is the largest g_j; with a share s, the smallest number that a share s of the clients does not
    exceed. The clients that violate their own constraint (of those up to g) descend it, so that the
    mean of what all send is the mean of these clients' ∇g_j; if none does, the worst client alone.

    The history has `worst_client`, the client with the largest g_j, and `violators`, the number of
    clients with g_j above `tolerance`.

    Args:
        constraint: g_j, a function of (params, one client's data), or a constraint that each client
            evaluates on its own data, such as `fs.constraints.sensitivity(...)`.
        share: The share of clients that must satisfy it.
        tolerance: The g_j up to which a client is not counted among the violators.
        name: A name to put before those in the history, as in `NAME.violators`; empty for none.

    Raises:
        InvalidInput: If the share is not in (0, 1].

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> problem = fs.Problem(
        ...     lambda w, data: -w[0],
        ...     {"limit": np.array([1.0, 3.0, 2.0])},
        ...     params=np.full(1, 2.5),
        ...     constraint=fs.EachClient(lambda w, data: w[0] - data["limit"]),
        ... )
        >>> run = fs.solve(problem, fs.FedSGM(0.01), rounds=1)
        >>> int(run.history["worst_client"][0]), int(run.history["violators"][0])
        (0, 2)
    """

    constraint: Constraint
    share: float = eqx.field(static=True)
    tolerance: float = eqx.field(static=True)
    name: str = eqx.field(static=True)

    def __init__(
        self,
        constraint: Constraint | Function,
        share: float | int = 1.0,
        tolerance: float | int = 0.0,
        name: str = "",
    ):
        if isinstance(share, bool) or not 0 < share <= 1:
            raise InvalidInput(
                f"share is the share of clients, above 0 and at most 1, got {share}."
            )
        if not np.isfinite(tolerance):
            raise InvalidInput(f"tolerance must be finite, got {tolerance}.")
        self.constraint = as_constraint(constraint)
        if isinstance(self.constraint, EachClient):
            raise InvalidInput("EachClient takes the constraint of one client, not an EachClient.")
        self.share, self.tolerance, self.name = float(share), float(tolerance), name

    def measure(self, params: PyTree, samples: Samples, scale: Scale) -> Float[Array, ""]:
        """Compute g_j."""
        return self._own(params, samples, scale)[0]

    def combine(self, replies: Replies, weights: Weights = None) -> tuple[Float[Array, ""], Active]:
        """Compute the largest g_j, or that of the share, and who is to descend."""
        values = jnp.where(replies.arrived, replies.values, -jnp.inf)
        count = jnp.maximum(replies.count, 1)
        # The share's value: at most this many clients may be above it.
        spared = count - jnp.ceil(self.share * count - 1e-6).astype(jnp.int32)
        g = jnp.sort(values)[::-1][jnp.minimum(spared, len(values) - 1)]
        slack = 1e-5 * (1 + jnp.abs(g))  # a client's value there may differ in its last bits
        least = jnp.where(g > 0, jnp.minimum(0, g), g - slack)
        most = g + slack
        active = jnp.sum((values > least) & (values <= most))
        factor = count / jnp.maximum(active, 1)
        g = jnp.where(jnp.any(replies.arrived), g, 0)
        end = jnp.finfo(g.dtype).max  # sites refuse messages that are not finite
        least, most = jnp.maximum(least, -end), jnp.where(spared > 0, most, end)
        return g, Active(least, most, factor.astype(g.dtype))

    def local(self, params: PyTree, samples: Samples, focus: Active) -> Float[Array, ""]:
        """Compute the client's part of what is descended: its g_j, if it is to reduce it."""
        return self.descended(params, samples, focus, 1)

    def descended(
        self, params: PyTree, samples: Samples, focus: Active, scale: Scale
    ) -> Float[Array, ""]:
        """Compute the client's part of what is descended: its g_j, if it is to reduce it."""
        value, inner = jax.tree.map(lax.stop_gradient, self._own(params, samples, scale))
        active = (value > focus.least) & (value <= focus.most)
        own = self.constraint.descended(params, samples, inner, scale)
        return jnp.where(active, focus.factor, 0) * own

    def report(self, replies: Replies) -> dict[str, Array]:
        """Compute which client is worst, and how many violate their constraint."""
        values = jnp.where(replies.arrived, replies.values, -jnp.inf)
        before = f"{self.name}." if self.name else ""
        return {
            f"{before}worst_client": jnp.argmax(values).astype(jnp.int32),
            f"{before}violators": jnp.sum(values > self.tolerance, dtype=jnp.int32),
        }

    def renamed(self, name: str) -> EachClient:
        """Return the constraint with another name."""
        return EachClient(self.constraint, self.share, self.tolerance, name)

    def fitted(self, samples: Samples) -> EachClient:
        """Return the constraint for these clients; raise if some client has no g_j."""
        inner = self.constraint.fitted(samples)
        inner.check_each(samples)
        return EachClient(inner, self.share, self.tolerance, self.name)

    def adapt(self, exact: Exact) -> EachClient:
        """Return the constraint with its functions made exact on padded samples."""
        inner = self.constraint.adapt(exact)
        return EachClient(inner, self.share, self.tolerance, self.name)

    def _own(
        self, params: PyTree, samples: Samples, scale: Scale
    ) -> tuple[Float[Array, ""], PyTree]:
        """Return the client's g_j, and its focus, as if it were alone."""
        measured = self.constraint.measure(params, samples, scale)
        alone = Replies(
            jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], measured), np.ones(1, bool)
        )
        return self.constraint.combine(alone)
