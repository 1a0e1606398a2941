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

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fedsolve.algorithms.fedavg import FedAvg
from fedsolve.compression.error_feedback import no_residual
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_positive, scalar
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem

Vector = Float[Array, " d"]
Representations = Float[Array, "samples features"]


class Kept(NamedTuple):
    """w_i^{t−1}, and what a biased uplink has not sent yet."""

    previous: Vector
    residual: Vector | None


class MOON(FedAvg):
    """Averaging in which representations are drawn to the server's model and away from a client's
    own previous one."""

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

    def unsent(self, clients: Kept) -> Any:
        return clients.residual

    # On a client

    def init_client(self, w: Vector) -> Kept:
        return Kept(w, no_residual(self.uplink, w))

    def improve(self, client: Client, kept: Kept) -> tuple[Kept, Packet]:
        def loss(v: Vector, key: Key[Array, ""]) -> Float[Array, ""]:
            z, weights = client.representation(v, key)
            positive = similarity(z, client.representation(client.w, key)[0]) / self.temperature
            negative = similarity(z, client.representation(kept.previous, key)[0])
            against = jax.nn.softplus(negative / self.temperature - positive)
            return client.objective(v, key) + self.contrast * (weights @ against)

        total = self.descend(client, jax.grad(loss))
        previous = client.w - self.reach(client.round) * total
        residual, packet = self.compress(client, kept.residual, total)
        return Kept(previous, residual), packet


def similarity(z: Representations, other: Representations) -> Float[Array, " samples"]:
    """The cosine between rows."""
    squares = jnp.sum(z**2, axis=1) * jnp.sum(other**2, axis=1)
    # Bounded below inside the root: rectified rows can be all zero, where its slope is infinite.
    return jnp.sum(z * other, axis=1) / jnp.sqrt(jnp.maximum(squares, 1e-16))
