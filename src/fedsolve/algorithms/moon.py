"""MOON: model-contrastive federated learning.

Paper: Li, He, Song, "Model-Contrastive Federated Learning" (CVPR 2021), Algorithm 1.

| here | paper | |
|---|---|---|
| `contrast` | μ | weight of the contrastive loss |
| `temperature` | τ | |
| `problem.representation` | R_w(x) | a sample's representation, before the model's last layer |
| `previous` | w_i^{t−1} | where client i came to when it last took part; at first, the start |

A client's loss at v is f_i(v) + μ·(mean over its samples of)

    −log [ exp(sim(z, z_global)/τ) / (exp(sim(z, z_global)/τ) + exp(sim(z, z_previous)/τ)) ],

with z = R_v(x), z_global = R_w(x), z_previous = R_{previous}(x), and sim the cosine.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.compression.error_feedback import no_residual
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import PRNGKey, Vector

Representations = Float[Array, "samples features"]


class Kept(NamedTuple):
    """w_i^{t−1}, and what a biased uplink has not sent yet."""

    previous: Vector
    residual: Vector | None


class MOON(FedAvg):
    """Federated averaging with a contrastive loss on representations.

    The loss draws the representations of the local model towards those of the server's model, and
    away from those of the client's previous model.

    Args:
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink, server_optimizer:
            Local training, compression and the server's step; see `FedAvg`.
        contrast: μ, the weight of the contrastive loss; 0 is FedAvg.
        temperature: τ.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: 0.5 * jnp.mean((data["x"] @ w - data["y"]) ** 2),
        ...     clients={"x": jnp.ones((4, 5, 3)), "y": jnp.ones((4, 5))},
        ...     params=jnp.zeros(3),
        ...     representation=lambda w, data: data["x"] * w,
        ... )
        >>> run = fs.solve(problem, fs.MOON(0.05, contrast=0.1), rounds=3)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """

    contrast: Scalar = eqx.field(converter=scalar("contrast"), default=1.0)
    temperature: Scalar = eqx.field(converter=scalar("temperature"), default=0.5)

    def __check_init__(self):
        check_positive("contrast", self.contrast, zero=True)
        check_positive("temperature", self.temperature)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.representation is None:
            raise InvalidInput(
                "MOON compares representations: give the problem `representation`, a function of "
                "(params, data) with a row for each sample."
            )

    # On the server

    def unsent(self, clients: Kept) -> Float[Array, "n d"] | None:
        return clients.residual

    # On a client

    def init_client(self, w: Vector) -> Kept:
        return Kept(w, no_residual(self.uplink, w))

    def improve(self, client: Client, kept: Kept) -> tuple[Kept, Packet]:
        def contrast(v: Vector, key: PRNGKey) -> Float[Array, ""]:
            z, weights = client.representation(v, key)
            positive = similarity(z, client.representation(client.w, key)[0]) / self.temperature
            negative = similarity(z, client.representation(kept.previous, key)[0])
            against = jax.nn.softplus(negative / self.temperature - positive)
            return jnp.asarray(self.contrast * (weights @ against))

        def direction(v: Vector, key: PRNGKey) -> Vector:
            apart: Vector = jax.grad(contrast)(v, key)
            return client.grad(v, key) + apart

        total = self.descend(client, direction)
        previous = client.w - self.reach(client.round) * total
        residual, packet = self.compress(client, kept.residual, total)
        return Kept(previous, residual), packet


def similarity(z: Representations, other: Representations) -> Float[Array, " samples"]:
    """Return the cosine between rows."""
    squares = jnp.sum(z**2, axis=1) * jnp.sum(other**2, axis=1)
    # Bounded below inside the root: rectified rows can be all zero, where its slope is infinite.
    return jnp.sum(z * other, axis=1) / jnp.sqrt(jnp.maximum(squares, 1e-16))
