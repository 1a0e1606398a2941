"""q-FedAvg: federated averaging that gives clients with a higher loss more weight (q-FFL).

Paper: Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning" (ICLR 2020),
Algorithm 2; with one local step it is their q-FedSGD (Algorithm 1). It minimises

    f_q(w) = Σ_k p_k F_k(w)^{q+1} / (q + 1),   F_k ≥ 0.

In a round, a client takes local steps from w to w_k and sends

    Δ_k = F_k(w)^q L (w − w_k),   h_k = q F_k(w)^{q−1} ‖L (w − w_k)‖² + L F_k(w)^q,

and the server moves w ← w − Σ Δ_k / Σ h_k. For one step, h_k bounds the Lipschitz constant of F_k^q
∇F_k, if that of ∇F_k is L: so one L, tuned for q = 0, serves every q.

| here | paper | |
|---|---|---|
| `fairness` | q | 0 is FedAvg |
| `step_size` | η = 1/L | |
| `local_steps` | E | |
| `update` | Δ_k | sent with compression |
| `curvature` | h_k | one number |
| weights | p_k | equal by default; in both sums |

F_k(w) is computed from all samples of the client. Special cases: q = 0 is FedAvg with the mean of
the participants; as q grows, the largest F_k decides (AFL).
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.algorithms.fedavg import Averaging, X
from fedsolve.compression.packets import Packet
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, at, check_positive, scalar
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.types import Info, PRNGKey, Vector

Sent = dict[str, Packet | Float[Array, ""]]


class QFedAvg(Averaging):
    """Minimise Σ p_k F_k^{q+1} (q-FedAvg), so that losses differ less between clients.

    Losses must not be negative: a client whose loss is negative replies NaN, and the run stops
    with its name.

    Args:
        step_size: η of the local steps, a number or a schedule; with a `local_optimizer`, the
            server's step. The paper's L is 1/η.
        fairness: q, at least 0; 0 is FedAvg.
        local_steps, local_epochs, local_optimizer, uplink, downlink, error_feedback:
            Local training and compression; see `FedAvg`.
        server_optimizer: The optimizer of the server; see `FedAvg`.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> run = fs.solve(problem, fs.QFedAvg(0.05, fairness=2.0), rounds=3)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """

    fairness: Scalar = eqx.field(converter=scalar("fairness"), kw_only=True)

    def __check_init__(self):
        check_positive("fairness", self.fairness, zero=True)

    # On the server

    def init(self, w: Vector) -> X:
        return self.start(w)

    def round(self, fed: Federation, server: X, key: PRNGKey) -> tuple[X, Info]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        answers = fed.ask(self.improve, drawn.cohort, when=drawn.available)
        curvature = answers.pick("curvature").mean(drawn.weights)
        curvature = at(self.step_size, fed.round) * jnp.where(curvature > 0, curvature, jnp.inf)
        update = answers.pick("update").mean(drawn.weights) / curvature
        x = self.step(fed, server, update, to_compress, answers.any())  # x − η update
        self.learn(fed, update)
        return x, drawn.info

    # On a client

    def improve(self, client: Client, residual: Vector | None) -> tuple[Vector | None, Sent]:
        q, lipschitz = self.fairness, 1 / at(self.step_size, client.round)
        total = self.descend(client, client.grad, Follows())  # L (w − w_k)
        loss = client.with_all_samples().objective(client.w)
        scale = jnp.where(loss >= 0, loss, jnp.nan) ** q
        # where F_k is 0, it is least, and so are Δ_k and what 0^(q − 1) would multiply
        inner = jnp.where(loss > 0, q * scale / jnp.where(loss > 0, loss, 1), 0)
        curvature = inner * jnp.sum(total**2) + lipschitz * scale
        residual, packet = self.compress(client, residual, scale * total)
        return residual, {"update": packet, "curvature": curvature.astype(total.dtype)}
