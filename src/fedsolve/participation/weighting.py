"""Weighting: how much each client is preferred, as weights over all clients.

| weighting | weight of client m, before normalisation | asks clients for |
|---|---|---|
| `Uniform` | 1 | nothing |
| `DataSize` | n_m | its size, once |
| `PowerOfChoice` | f_m(w) among candidates drawn by n_m, else 0 | size, once; candidates' loss |
| `BANT` | smoothed exp(−loss on the server's data of w − step·∇f_m(w)) | ∇f_m(w) |
| `FOLB` | ⎮⟨∇f_m(w), d⟩⎮, d the previous direction of the server | one number, and d goes down |
| `GradientNorm` | ‖∇f_m(w)‖ | one number |
| `DivFL` | the clients that m represents, if it is chosen, else 0 | ∇f_m(w) |
| `Oort` | 1 if it is chosen, by loss and speed, else 0 | one number, of participants only |

Asking clients is an exchange, whose bytes are counted like those of any other. A client that did
not answer has weight 0 in this round (with `BANT`, the trust it had before).

In a problem with a `batch_size`, `look` says from which samples a client computes its answer:
`"all"` or a `"minibatch"`. The defaults are those of PPBC's Appendix B: local losses are "based on
their datasets", gradients are ∇f_m(w, ξ).

Papers: Cho et al., "Towards Understanding Biased Client Selection in Federated Learning" (2022);
Xie et al. (2019), trust by a validation set; Nguyen et al., "Fast-Convergent Federated Learning"
(FOLB, 2020); Wang et al. (2020), sampling by gradient norms; all as PPBC's Appendix B states them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import (
    Scalar,
    check_count,
    check_momentum,
    check_positive,
    scalar,
    static,
)
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import Cohort, Flag, Flags, Info, PRNGKey, PyTree, Vector

Weights = Float[Array, " n"] | None  # None: equal weights, known before the program runs
Up = Bool[Array, "..."] | Bool[np.ndarray, "..."] | bool  # for each client, or for all
Sizes = Int[Array, " n"]  # 0: not known yet
Trust = tuple[Float[Array, " n"], Bool[Array, " n"]]  # trust, and whether the client ever answered


class Methods(NamedTuple):
    """The algorithm's client methods that a weighting may ask clients to run."""

    assess: Callable
    tell_size: Callable


LOOKS = ("all", "minibatch")


class Weighting(eqx.Module):
    """Base class of weightings: rules that give every client a weight in each round.

    A weighting may ask clients, and may keep state (`memory`) on the server from round to round.
    """

    watches_cohort: ClassVar[bool] = False  # whether it learns from who took part (`watch`)

    def init(self, w: Vector, clients: int) -> PyTree:
        """Return the memory before the first round.

        Args:
            w: The initial parameters.
            clients: The number of clients n.
        """
        return None

    @abc.abstractmethod
    def weigh(
        self, fed: Federation, methods: Methods, memory: PyTree, up: Up, key: PRNGKey
    ) -> tuple[Weights, PyTree]:
        """Compute the weights of this round.

        Args:
            fed: The federation, for asking clients.
            methods: The client methods to ask for; `methods.assess` runs `assess` on a client.
            memory: The memory before this round.
            up: Which clients are available: a flag for each, or one for all.
            key: A random key.

        Returns:
            The weights (None for equal ones), and the memory after this round.
        """

    def assess(self, client: Client, message: PyTree) -> PyTree:
        """Compute, on a client, its reply to `fed.ask(methods.assess, ...)`.

        Args:
            client: The client.
            message: What the server sent; left out if nothing was sent.

        Returns:
            The reply.
        """
        raise InvalidInput(f"{type(self).__name__} asks clients nothing.")

    def learn(self, memory: PyTree, direction: Vector) -> PyTree:
        """Return the memory after the server stepped.

        Args:
            memory: The memory after `weigh`.
            direction: The server's descent direction in this round.
        """
        return memory

    def watch(
        self, fed: Federation, methods: Methods, memory: PyTree, cohort: Cohort, when: Flag | Flags
    ) -> PyTree:
        """Return the memory after the cohort was drawn; it may ask the cohort.

        Only where `watches_cohort` is true.

        Args:
            fed: The federation, for asking clients.
            methods: The client methods to ask for.
            memory: The memory after `weigh`.
            cohort: The participants of this round.
            when: Which of them can be asked.
        """
        return memory

    def info(self, memory: PyTree) -> Info:
        """Return what to record in the history, from the memory after `weigh`."""
        return {}

    def limits(self) -> Info:
        """Return known limits of recorded quantities, by name; plots show them."""
        return {}

    def objective_weights(self, memory: PyTree) -> Weights:
        """Return p if the weights are part of the problem, which is then to minimise Σ p_m f_m.

        None means the plain mean: the weights only help to minimise it.
        """
        return None

    def check(self, problem: Problem) -> None:
        """Raise if the weighting does not apply to the problem."""


class Uniform(Weighting):
    """Give all clients the same weight.

    Example:
        >>> import fedsolve as fs
        >>> algorithm = fs.FedAvg(0.1, weighting=fs.participation.Uniform())
    """

    def weigh(
        self, fed: Federation, methods: Methods, memory: None, up: Up, key: PRNGKey
    ) -> tuple[None, None]:
        return None, None


class DataSize(Weighting):
    """Weight clients by their number of samples, n_m / n.

    Each client is asked for its size once, when it is first available.

    Example:
        >>> import fedsolve as fs
        >>> algorithm = fs.FedAvg(0.1, weighting="DataSize")
        >>> algorithm.weighting
        DataSize()
    """

    def init(self, w: Vector, clients: int) -> Sizes:
        return jnp.zeros(clients, jnp.int32)

    def weigh(
        self, fed: Federation, methods: Methods, memory: Sizes, up: Up, key: PRNGKey
    ) -> tuple[Weights, Sizes]:
        sizes = _learn_sizes(fed, methods, memory, up)
        return normalised(sizes.astype(fed.w.dtype)), sizes


class PowerOfChoice(Weighting):
    """Weight clients by their local loss f_m(w), among candidates drawn by data size.

    If a loss is negative, all are shifted by the same amount so that the smallest is 0.

    Args:
        candidates: How many candidates are drawn, without replacement; None for all clients.
        look: `"all"`: a client's loss over all of its samples; `"minibatch"`: over one minibatch.

    Example:
        >>> import fedsolve as fs
        >>> weighting = fs.participation.PowerOfChoice(candidates=10)
        >>> algorithm = fs.FedAvg(
        ...     0.1, weighting=weighting, selection=fs.participation.Top(3)
        ... )
    """

    candidates: int | None = static(None)
    look: str = static("all")

    def __check_init__(self):
        _check_look(self.look)
        if self.candidates is not None:
            check_count("candidates", self.candidates)

    def init(self, w: Vector, clients: int) -> Sizes:
        return jnp.zeros(clients, jnp.int32)

    def weigh(
        self, fed: Federation, methods: Methods, memory: Sizes, up: Up, key: PRNGKey
    ) -> tuple[Weights, Sizes]:
        n, sizes = fed.clients, memory
        cohort: Cohort = np.arange(n, dtype=np.int32)
        if self.candidates is not None and self.candidates < n:
            sizes = _learn_sizes(fed, methods, memory, up)
            known = normalised(sizes.astype(fed.w.dtype))
            cohort = draw_proportionally(key, known, self.candidates)
        asked = up if isinstance(up, bool) or jnp.ndim(up) == 0 else up[cohort]
        losses = fed.ask(methods.assess, cohort, when=asked)
        least = jnp.minimum(jnp.min(jnp.where(losses.arrived, losses.values, 0)), 0)
        scores = jnp.where(losses.arrived, losses.values - least, 0)
        return normalised(jnp.zeros(n, scores.dtype).at[cohort].set(scores)), sizes

    def assess(self, client: Client, message: None = None) -> Float[Array, ""]:
        return _looking(client, self.look).objective(client.w)

    def check(self, problem: Problem) -> None:
        if self.candidates is not None:
            check_count("candidates", self.candidates, most=problem.n)


class BANT(Weighting):
    """Weight clients by trust: how well the model that a client proposes does on the server's data.

    A client proposes w − step_size·∇f_m(w), whose loss on the problem's `validation` data updates
    its trust: trust ← momentum·trust + (1 − momentum)·exp(−loss). Clients send their gradients.

    Args:
        step_size: The step of the proposed model.
        momentum: How much of the previous trust is kept.
        look: The samples of ∇f_m(w), `"all"` or a `"minibatch"`.

    Example:
        >>> import fedsolve as fs
        >>> weighting = fs.participation.BANT(step_size=0.05)
        >>> algorithm = fs.FedAvg(0.1, weighting=weighting)
    """

    step_size: Scalar = eqx.field(converter=scalar("step_size"), default=0.1)
    momentum: Scalar = eqx.field(converter=scalar("momentum"), default=0.5)
    look: str = static("minibatch")

    def __check_init__(self):
        _check_look(self.look)
        check_positive("step_size", self.step_size)
        check_momentum("momentum", self.momentum)

    def init(self, w: Vector, clients: int) -> Trust:
        return jnp.zeros(clients, w.dtype), jnp.zeros(clients, bool)

    def weigh(
        self, fed: Federation, methods: Methods, memory: Trust, up: Up, key: PRNGKey
    ) -> tuple[Weights, Trust]:
        trust, known = memory
        answers = fed.ask(methods.assess, fed.everyone, when=up)
        losses = jax.lax.map(lambda v: fed.validate(fed.w - self.step_size * v), answers.values)
        fresh = jnp.exp(-losses)
        smooth = jnp.where(known, self.momentum * trust + (1 - self.momentum) * fresh, fresh)
        trust = jnp.where(answers.arrived, smooth, trust).astype(trust.dtype)
        return normalised(trust), (trust, known | answers.arrived)

    def assess(self, client: Client, message: None = None) -> Vector:
        return _looking(client, self.look).grad(client.w)

    def check(self, problem: Problem) -> None:
        if problem.validation is None:
            raise InvalidInput(
                "BANT needs data that the server holds: give the problem `validation`, in the form "
                "of one client's data."
            )


class FOLB(Weighting):
    """Weight clients by how well their gradient agrees with the server's previous step.

    Before the first step all clients have the same weight.

    Args:
        look: The samples of ∇f_m(w), `"all"` or a `"minibatch"`.

    Example:
        >>> import fedsolve as fs
        >>> algorithm = fs.FedAvg(0.1, weighting="FOLB", selection=fs.participation.Top(3))
    """

    look: str = static("minibatch")

    def __check_init__(self):
        _check_look(self.look)

    def init(self, w: Vector, clients: int) -> Vector:
        return jnp.zeros_like(w)

    def weigh(
        self, fed: Federation, methods: Methods, memory: Vector, up: Up, key: PRNGKey
    ) -> tuple[Weights, Vector]:
        return normalised(_scores(fed, methods, up, memory)), memory

    def assess(self, client: Client, message: Vector) -> Float[Array, ""]:
        return jnp.abs(_looking(client, self.look).grad(client.w) @ message)

    def learn(self, memory: Vector, direction: Vector) -> Vector:
        return direction


class GradientNorm(Weighting):
    """Weight clients by the norm of their gradient, ‖∇f_m(w)‖ (GNS).

    Args:
        look: The samples of ∇f_m(w), `"all"` or a `"minibatch"`.

    Example:
        >>> import fedsolve as fs
        >>> algorithm = fs.FedAvg(
        ...     0.1, weighting="GradientNorm", selection=fs.participation.Proportional(3)
        ... )
    """

    look: str = static("minibatch")

    def __check_init__(self):
        _check_look(self.look)

    def weigh(
        self, fed: Federation, methods: Methods, memory: None, up: Up, key: PRNGKey
    ) -> tuple[Weights, None]:
        return normalised(_scores(fed, methods, up)), None

    def assess(self, client: Client, message: None = None) -> Float[Array, ""]:
        return jnp.linalg.norm(_looking(client, self.look).grad(client.w))


def normalised(scores: Float[Array, " n"]) -> Float[Array, " n"]:
    """Scale scores to sum to 1; if all are zero, return equal weights."""
    total = jnp.sum(scores)
    return jnp.where(total > 0, scores / jnp.where(total > 0, total, 1), 1 / scores.size)


def draw_proportionally(key: PRNGKey, weights: Float[Array, " n"], count: int) -> Int[Array, " m"]:
    """Draw `count` clients without replacement in proportion to their weights (Gumbel top-k).

    Clients of weight 0 come last.
    """
    noise = jax.random.gumbel(key, weights.shape, weights.dtype)
    return jax.lax.top_k(jnp.log(weights) + noise, min(count, weights.size))[1].astype(jnp.int32)


def _check_look(look: str) -> None:
    """Raise if this does not say at which samples a client looks."""
    if look not in LOOKS:
        raise InvalidInput(f'look must be "all" or "minibatch", got {look!r}.')


def _looking(client: Client, look: str) -> Client:
    """Return the client that looks at all of its samples, or at a minibatch."""
    return client.with_all_samples() if look == "all" else client


def _scores(
    fed: Federation, methods: Methods, up: Up, message: Vector | None = None
) -> Float[Array, " n"]:
    """Ask all clients for a number; it is 0 for those that did not answer."""
    answers = fed.ask(methods.assess, fed.everyone, message, when=up)
    return jnp.where(answers.arrived, answers.values, 0)


def _learn_sizes(fed: Federation, methods: Methods, sizes: Sizes, up: Up) -> Sizes:
    """Ask for the sizes that are not known yet."""
    answers = fed.ask(methods.tell_size, fed.everyone, when=(sizes == 0) & up)
    return jnp.where(answers.arrived, answers.values, sizes)
