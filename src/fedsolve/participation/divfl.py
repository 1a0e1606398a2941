"""DivFL: the clients whose gradients represent those of all clients best.

Paper: Balakrishnan et al., "Diverse Client Selection for Federated Learning via Submodular
Maximization" (ICLR 2022), Algorithm 1.

| here | paper | |
|---|---|---|
| `count` | K | |
| `nearest` | min_{i in S} ‖∇F_k − ∇F_i‖ | how far client k is from the selected one next to it |
| `shares` | γ_i/N | the part of all clients that selected client i represents, see (2) |

S is chosen greedily: in every step the client that reduces Σ_k min_{i in S} ‖∇F_k − ∇F_i‖ most.
That sum bounds the error of Σ_{i in S} γ_i ∇F_i as an estimate of Σ_k ∇F_k.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import check_count, static
from fedsolve.participation.weighting import LOOKS, Methods, Up, Weighting, Weights
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import PRNGKey, PyTree, Round, Vector


class DivFL(Weighting):
    """Select clients whose gradients are close to those of all clients.

    All available clients send their gradients in every round, and these are counted as messages.
    The weight of a selected client is the share of clients to which it is the closest one; all
    others have weight 0. Use it with `Top(count)`, or with `Top(count, equal=True)` to average as
    the paper's Algorithm 1 does.

    Args:
        count: How many clients represent all of them.
        look: The samples of ∇f_m(w), `"all"` or a `"minibatch"`.

    Example:
        >>> import fedsolve as fs
        >>> parts = fs.participation
        >>> algorithm = fs.FedAvg(0.1, weighting=parts.DivFL(3), selection=parts.Top(3))
    """

    count: int = eqx.field(static=True)
    look: str = static("minibatch")

    def __check_init__(self):
        check_count("count", self.count)
        if self.look not in LOOKS:
            raise InvalidInput(f'look must be "all" or "minibatch", got {self.look!r}.')

    def weigh(
        self, fed: Federation, methods: Methods, memory: None, up: Up, key: PRNGKey
    ) -> tuple[Weights, None]:
        answers = fed.ask(methods.assess, fed.everyone, when=up)
        shares = representatives(answers.values, jnp.asarray(answers.arrived), self.count)
        return shares.astype(fed.w.dtype), None

    def assess(self, client: Client, message: PyTree = None) -> Vector:
        return (client.with_all_samples() if self.look == "all" else client).grad(client.w)

    def check(self, problem: Problem) -> None:
        check_count("count", self.count, most=problem.n)


def representatives(
    gradients: Float[Array, "n d"], there: Bool[Array, " n"], count: int
) -> Float[Array, " n"]:
    """Choose clients greedily, and return which share of all clients each represents.

    Args:
        gradients: The clients' gradients.
        there: Which clients can be chosen, and are to be represented.
        count: How many are chosen; fewer if fewer are there.

    Returns:
        γ/N: 0 for clients that were not chosen. If no client is there, equal shares.
    """
    n = len(gradients)
    distances = jnp.linalg.norm(gradients[:, None] - gradients[None], axis=2)
    distances = jnp.where(there[:, None], distances, 0)  # those who are away need nobody
    far = 2 * jnp.max(distances) + 1

    def add(
        step: Round, chosen: tuple[Int[Array, " m"], Float[Array, " n"]]
    ) -> tuple[Int[Array, " m"], Float[Array, " n"]]:
        members, nearest = chosen
        sums = jnp.sum(jnp.minimum(nearest[:, None], distances), axis=0)
        taken = jnp.zeros(n, bool).at[members].set(True, mode="drop")
        best = jnp.argmin(jnp.where(there & ~taken, sums, jnp.inf)).astype(members.dtype)
        best = jnp.where(jnp.any(there & ~taken), best, n)
        reach = jnp.where(best < n, distances[:, jnp.minimum(best, n - 1)], jnp.inf)
        return members.at[step].set(best), jnp.minimum(nearest, reach)

    start = jnp.full(count, n, jnp.int32), jnp.full(n, far)
    members, _ = jax.lax.fori_loop(0, count, add, start)
    to_each = jnp.where(members < n, distances[:, jnp.minimum(members, n - 1)], jnp.inf)
    closest = members[jnp.argmin(to_each, axis=1)]
    shares = jnp.zeros(n).at[closest].add(there, mode="drop") / jnp.maximum(jnp.sum(there), 1)
    return jnp.where(jnp.any(there), shares, 1 / n)
