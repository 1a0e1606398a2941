"""Who is wanted: weights over all clients.

| weighting | weight of client m, before they are made to sum to 1 | asks clients for |
|---|---|---|
| `Uniform` | 1 | nothing |
| `DataSize` | n_m | its size, once |
| `PowerOfChoice` | f_m(w) among candidates drawn by n_m, else 0 | size, once; candidates' loss |
| `BANT` | smoothed exp(−loss on the server's data of w − step·∇f_m(w)) | ∇f_m(w) |
| `FOLB` | ⎮⟨∇f_m(w), d⟩⎮, d the previous direction of the server | one number, and d goes down |
| `GradientNorm` | ‖∇f_m(w)‖ | one number |

Every question is an exchange and is metered like any other. A client that did not answer has weight
0 in this round (`BANT` remembers what it thought of it).

Papers: Cho et al., "Towards Understanding Biased Client Selection in Federated Learning" (2022);
Xie et al. (2019), trust by a validation set; Nguyen et al., "Fast-Convergent Federated Learning"
(FOLB, 2020); Wang et al. (2020), sampling by gradient norms; all as PPBC's Appendix B states them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, check_count, check_positive, scalar, static
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem

Weights = Float[Array, " n"] | None  # None: the same for all, known before the program runs
Up = Any  # who can be asked: flags over all clients, or one for all


class Methods(NamedTuple):
    """The algorithm's client methods by which a weighting asks."""

    assess: Callable
    tell_size: Callable


class Weighting(eqx.Module):
    """Gives every client a weight. It may ask clients, and may remember."""

    def init(self, w: Float[Array, " d"], clients: int) -> PyTree:
        """What the server remembers for it, before the first round."""
        return None

    def weigh(
        self, fed: Federation, methods: Methods, memory: PyTree, up: Up, key: Key[Array, ""]
    ) -> tuple[Weights, PyTree]:
        """The weights, and the memory after this."""
        raise NotImplementedError

    def assess(self, client: Client, message: PyTree) -> PyTree:
        """On a client: its answer to what `weigh` asks by `methods.assess`."""
        raise InvalidInput(f"{type(self).__name__} asks clients nothing.")

    def learn(self, memory: PyTree, direction: Float[Array, " d"]) -> PyTree:
        """The memory after the server moved along `direction` (downhill)."""
        return memory

    def info(self, memory: PyTree) -> dict[str, Any]:
        """What it writes in the history, from the memory after `weigh`."""
        return {}

    def limits(self) -> dict[str, Any]:
        """Where what it writes is known to settle."""
        return {}

    def objective_weights(self, memory: PyTree) -> Weights:
        """p, where the weights are part of the problem, minimise Σ p_m f_m, and not only a way to
        its solution; None where that is the plain mean."""
        return None

    def check(self, problem: Problem) -> None:
        """Refuses, with a sentence, a problem that it cannot work with."""


class Uniform(Weighting):
    """Everyone is wanted as much."""

    def weigh(
        self, fed: Federation, methods: Methods, memory: None, up: Up, key: Key[Array, ""]
    ) -> tuple[None, None]:
        return None, None


class DataSize(Weighting):
    """n_m / n. Sizes are asked for once, of each client when it is first available."""

    def init(self, w: Float[Array, " d"], clients: int) -> Int[Array, " n"]:
        return jnp.zeros(clients, jnp.int32)  # 0: not known yet

    def weigh(
        self, fed: Federation, methods: Methods, memory: Array, up: Up, key: Key[Array, ""]
    ) -> tuple[Weights, Array]:
        sizes = _learn_sizes(fed, methods, memory, up)
        return normalised(sizes.astype(fed.w.dtype)), sizes


class PowerOfChoice(Weighting):
    """The local loss, among `candidates` clients drawn by data size without replacement; all
    clients are candidates if None."""

    candidates: int | None = static(None)

    def __check_init__(self):
        if self.candidates is not None:
            check_count("candidates", self.candidates)

    def init(self, w: Float[Array, " d"], clients: int) -> Int[Array, " n"]:
        return jnp.zeros(clients, jnp.int32)

    def weigh(
        self, fed: Federation, methods: Methods, memory: Array, up: Up, key: Key[Array, ""]
    ) -> tuple[Weights, Array]:
        n, sizes = fed.clients, memory
        who: Any = np.arange(n, dtype=np.int32)
        if self.candidates is not None and self.candidates < n:
            sizes = _learn_sizes(fed, methods, memory, up)
            known = normalised(sizes.astype(fed.w.dtype))
            who = draw_proportionally(key, known, self.candidates)
        asked = up if jnp.ndim(up) == 0 else up[who]
        losses = fed.ask(methods.assess, who, when=asked)
        scores = jnp.where(losses.arrived, jnp.maximum(losses.values, 0), 0)
        return normalised(jnp.zeros(n, scores.dtype).at[who].set(scores)), sizes

    def assess(self, client: Client, message: None = None) -> Float[Array, ""]:
        return client.objective(client.w)

    def check(self, problem: Problem) -> None:
        if self.candidates is not None:
            check_count("candidates", self.candidates, most=problem.n)


class BANT(Weighting):
    """Trust: exp of minus the loss, on validation data that the server holds, of the model that a
    client proposes, w − step_size·∇f_m(w); smoothed over rounds,
    trust ← momentum·trust + (1 − momentum)·exp(−loss).

    The data are the problem's `validation`. A client's whole gradient goes up for it.
    """

    step_size: Scalar = eqx.field(converter=scalar("step_size"), default=0.1)
    momentum: Scalar = eqx.field(converter=scalar("momentum"), default=0.5)

    def __check_init__(self):
        check_positive("step_size", self.step_size)
        check_positive("momentum", self.momentum, zero=True)

    def init(self, w: Float[Array, " d"], clients: int) -> tuple[Array, Array]:
        return jnp.zeros(clients, w.dtype), jnp.zeros(clients, bool)  # trust, and whether heard

    def weigh(
        self, fed: Federation, methods: Methods, memory: tuple, up: Up, key: Key[Array, ""]
    ) -> tuple[Weights, tuple]:
        trust, known = memory
        answers = fed.ask(methods.assess, fed.everyone, when=up)
        losses = jax.lax.map(lambda v: fed.validate(fed.w - self.step_size * v), answers.values)
        fresh = jnp.exp(-losses)
        smooth = jnp.where(known, self.momentum * trust + (1 - self.momentum) * fresh, fresh)
        trust = jnp.where(answers.arrived, smooth, trust).astype(trust.dtype)
        return normalised(trust), (trust, known | answers.arrived)

    def assess(self, client: Client, message: None = None) -> Float[Array, " d"]:
        return client.grad(client.w)

    def check(self, problem: Problem) -> None:
        if problem.validation is None:
            raise InvalidInput(
                "BANT needs data that the server holds: give the problem `validation`, in the form "
                "of one client's data."
            )


class FOLB(Weighting):
    """How much of a client's gradient lies along the previous step of the server. Before the first
    step everyone is wanted as much."""

    def init(self, w: Float[Array, " d"], clients: int) -> Float[Array, " d"]:
        return jnp.zeros_like(w)

    def weigh(
        self, fed: Federation, methods: Methods, memory: Array, up: Up, key: Key[Array, ""]
    ) -> tuple[Weights, Array]:
        return normalised(_scores(fed, methods, up, memory)), memory

    def assess(self, client: Client, message: Float[Array, " d"]) -> Float[Array, ""]:
        return jnp.abs(client.grad(client.w) @ message)

    def learn(self, memory: Array, direction: Float[Array, " d"]) -> Array:
        return direction


class GradientNorm(Weighting):
    """‖∇f_m(w)‖ (GNS)."""

    def weigh(
        self, fed: Federation, methods: Methods, memory: None, up: Up, key: Key[Array, ""]
    ) -> tuple[Weights, None]:
        return normalised(_scores(fed, methods, up)), None

    def assess(self, client: Client, message: None = None) -> Float[Array, ""]:
        return jnp.linalg.norm(client.grad(client.w))


def normalised(scores: Float[Array, " n"]) -> Float[Array, " n"]:
    """Scores made to sum to 1; the same for all where they are all zero."""
    total = jnp.sum(scores)
    return jnp.where(total > 0, scores / jnp.where(total > 0, total, 1), 1 / scores.size)


def draw_proportionally(
    key: Key[Array, ""], weights: Float[Array, " n"], count: int
) -> Int[Array, " m"]:
    """`count` different clients, one after the other in proportion to the weights of those left
    (Gumbel top-k). Clients of weight 0 come last."""
    noise = jax.random.gumbel(key, weights.shape, weights.dtype)
    return jax.lax.top_k(jnp.log(weights) + noise, min(count, weights.size))[1].astype(jnp.int32)


def _scores(fed: Federation, methods: Methods, up: Up, message: PyTree = None) -> Array:
    answers = fed.ask(methods.assess, fed.everyone, message, when=up)
    return jnp.where(answers.arrived, answers.values, 0)


def _learn_sizes(fed: Federation, methods: Methods, sizes: Array, up: Up) -> Array:
    answers = fed.ask(methods.tell_size, fed.everyone, when=(sizes == 0) & up)
    return jnp.where(answers.arrived, answers.values, sizes)
