"""FedSGM: federated switching gradients under a functional constraint.

Paper: "FedSGM: A Unified Framework for Constraint Aware, Bidirectionally Compressed, Multi-Step
Federated Optimization", Algorithm 1; its forerunner "Switching Gradient Methods for Constrained
Federated Optimization" (OPT 2025), Algorithm 1, is the same with an unbiased uplink.

    minimise f(w) = (1/n) Σ f_j(w)   subject to   g(w) = (1/n) Σ g_j(w) ≤ 0,   w in X

| here | paper | |
|---|---|---|
| `step_size` | η | |
| `tolerance` | ε | g(w) ≤ ε counts as feasible |
| `switching` | σ, β | `Hard()` or `Soft(beta)` |
| `participants` | m | of n clients, drawn anew each round; or see `Participating` |
| `local_steps` | E | |
| `uplink` | C_j | EF14 with a biased compressor, none with an unbiased one |
| `downlink` | C_0 | EF21-P |
| `residual` | e_j | kept by client j |
| `estimate` | Ĝ(w_t) | mean of g_j over the cohort |
| `total` | Δ_j | Σ_τ ν_{j,τ} = (w_t − w_{j,E}) / η |
| `local_optimizer` | | takes ν for a gradient; then Δ_j = w_t − w_{j,E}, and η is the server's |

Special cases: no constraint and no compression is FedAvg; one client and one step is the switching
gradient method; one step with everyone, hard switching and both compressors is Safe-EF; no
constraint and one step with a biased uplink is EF14; with an unbiased one, FedCOM.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.algorithms.adaptive import Adaptive
from fedsolve.algorithms.common import CompressedTraining
from fedsolve.algorithms.guarantee import Guarantee
from fedsolve.algorithms.participating import Drawn
from fedsolve.algorithms.switching import AMONG, Hard, Soft, Switching, shares_among
from fedsolve.compression.compressors import Compressor, Identity
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import (
    Scalar,
    Schedule,
    at,
    check_kind,
    check_positive,
    scalar,
    static,
)
from fedsolve.local_updates.optimizers import Optimizer, as_optimizer
from fedsolve.participation.selection import Everyone, Random
from fedsolve.participation.weighting import Uniform
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.problem.problem import Problem
from fedsolve.problem.several import Several
from fedsolve.types import Flag, Info, PRNGKey, PyTree, Vector


class Server(eqx.Module):
    """x_t, and the running average w̄ with the weight it has gathered."""

    x: Vector
    average: Vector
    weight: Float[Array, ""]


class FedSGM(CompressedTraining):
    """Minimise under a functional constraint with switching gradients (Algorithm 1).

    In every round, m clients report g_j(w_t), whose mean Ĝ decides σ. They take E steps along
    (1 − σ)∇f_j + σ∇g_j and send their change, compressed. The server steps, projects, and publishes
    its own compressed change. `run.average` is w̄, the average of w_t weighted by 1 − σ_t: over
    feasible rounds for hard switching (Theorem 1), by α_t for soft switching (Theorem 2).

    With weights p of clients, the problem is min Σ p_j f_j subject to Σ p_j g_j ≤ 0. Both sums have
    the same weights, since steps along Σ p_j ∇g_j must reduce the g whose sign decides. (In a
    constraint on sums over samples, clients are weighted by their samples, whatever p is.)

    Args:
        step_size: η, a number or a schedule; with a `local_optimizer`, the server's step.
        tolerance: ε, points with g(w) ≤ ε are treated as feasible; or `Adaptive(ε)`, which allows
            for the error of Ĝ where some clients are drawn.
        switching: σ as a function of the violation, `Hard()` or `Soft(beta)`.
        local_steps: E, the local steps of a client in a round.
        local_epochs: Passes over a client's samples, in shuffled minibatches without replacement,
            in place of `local_steps`; theorems do not cover them.
        uplink: The compressor of the clients, with error feedback (EF14) if it is biased.
        downlink: The compressor of the server (EF21-P), which must be contractive.
        local_optimizer: The optimizer of the local steps (`fs.SGD`, `fs.Adam` or one of optax);
            None for gradient descent.
        among: Which of several constraints (`Several`) clients reduce: `"steepest"` (the one with
            the largest violation), `"violation"` (all that are violated, by their violation),
            `"round robin"` (these in turns) or `"blend"` (these equally).
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: 0.5 * jnp.sum((w - data["target"]) ** 2),
        ...     clients={"target": jnp.eye(3)},
        ...     params=jnp.zeros(3),
        ...     constraint=lambda w, data: jnp.sum(w) - 0.5,
        ... )
        >>> run = fs.solve(problem, fs.FedSGM(0.1, tolerance=0.01, local_steps=2), rounds=3)
        >>> sorted(set(run.history) & {"constraint", "objective", "switch"})
        ['constraint', 'objective', 'switch']
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    tolerance: Scalar | Adaptive = eqx.field(converter=scalar("tolerance"), default=0.0)
    switching: Switching = Hard()
    local_steps: int = static(1)
    uplink: Compressor = Identity()
    downlink: Compressor = Identity()
    local_optimizer: Optimizer | None = eqx.field(converter=as_optimizer, default=None)
    among: str = eqx.field(static=True, default="steepest", kw_only=True)
    # The guarantee of a theorem for exactly these numbers; `dataclasses.replace` drops it.
    guarantee: Guarantee | None = eqx.field(static=True, init=False, default=None)

    def __check_init__(self):
        check_kind("switching", self.switching, Switching)
        if self.among not in AMONG:
            raise InvalidInput(f"among must be one of {', '.join(AMONG)}, got {self.among!r}.")
        if not isinstance(self.tolerance, Adaptive):
            check_positive("tolerance", self.tolerance, zero=True)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if isinstance(self.tolerance, Adaptive):
            self._check_adaptive(problem)

    def _check_adaptive(self, problem: Problem) -> None:
        """Raise if the deviation of Ĝ cannot be estimated."""
        constraint = problem.constraint
        if constraint is None:
            raise InvalidInput("Adaptive is a tolerance of a constraint, and the problem has none.")
        if not constraint.has_deviation:
            kind = type(constraint).__name__
            raise InvalidInput(f"Adaptive does not know the sampling error of {kind} constraints.")
        drawn_equally = isinstance(self.selecting, Random | Everyone)
        if not isinstance(self.weighting, Uniform) or not drawn_equally:
            raise InvalidInput(
                "Adaptive is for clients of equal weight that are drawn uniformly: leave out "
                "weighting and selection."
            )
        if self.selecting.size == 1 < problem.n:
            raise InvalidInput("Adaptive compares clients of a cohort: it takes two at least.")

    @classmethod
    def from_theory(
        cls,
        problem: Problem,
        rounds: int,
        *,
        soft: bool = False,
        participants: int | None = None,
        local_steps: int = 1,
        uplink: Compressor | None = None,
        downlink: Compressor | None = None,
        **known: Any,
    ) -> FedSGM:
        """Take step size, tolerance and β from the theorem that covers the case.

        The theorem's guarantee is then `guarantee`; `run.certificate()` compares the run with it.

        Args:
            problem: The problem.
            rounds: The number of rounds T.
            soft: Whether to switch softly.
            participants: m, the participants in a round; None for all clients.
            local_steps: E, the local steps of a client in a round.
            uplink: The compressor of the clients; None for no compression.
            downlink: The compressor of the server; None for no compression.
            known: Constants by their names in `fs.theory.fedsgm` (`distance`, `lipschitz`,
                `sigma`, `failure`, …). If they are not given, D is taken from the domain, and G, σ
                and the noise are estimated at `points` sampled points; `guarantee.unchecked` lists
                such assumptions.

        Returns:
            The algorithm.

        Raises:
            InvalidInput: If no theorem covers the case.
        """
        from fedsolve.theory.fitting import fedsgm_for  # theory builds on algorithms

        uplink, downlink = uplink or Identity(), downlink or Identity()
        promise = fedsgm_for(
            problem,
            rounds,
            soft=soft,
            participants=participants,
            local_steps=local_steps,
            uplink=uplink,
            downlink=downlink,
            **known,
        )
        algorithm = cls(
            step_size=promise.step_size,
            tolerance=promise.tolerance,
            switching=Hard() if promise.beta is None else Soft(promise.beta),
            participants=participants,
            local_steps=local_steps,
            uplink=uplink,
            downlink=downlink,
        )
        object.__setattr__(algorithm, "guarantee", promise)  # not an argument of `cls`
        return algorithm

    # On the server

    def init(self, w: Vector) -> Server:
        return Server(x=w, average=jnp.zeros_like(w), weight=jnp.zeros((), w.dtype))

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        sigma, focus, heard, info = self.switch(fed, drawn)

        # w̄ takes in w_t with weight 1 − σ: a running mean, not a sum that grows
        share = jnp.where(heard, 1 - sigma, 0)
        weight = server.weight + share
        move = share / jnp.where(weight > 0, weight, 1)
        average = server.average + move * (fed.w - server.average)

        when = heard & drawn.available
        update = fed.ask(self.improve, drawn.cohort, (sigma, focus), when).mean(drawn.weights)
        x = fed.project(server.x - at(self.step_size, fed.round) * update)
        fed.publish(self.downlink(x - fed.w, to_compress))
        self.learn(fed, update)
        return Server(x, average, weight), drawn.info | info

    def switch(self, fed: Federation, drawn: Drawn) -> tuple[Float[Array, ""], PyTree, Flag, Info]:
        """Compute σ.

        Returns:
            σ, what clients must know of g, whether any client answered, and what to record.
        """
        if fed.constraint is None:
            return jnp.zeros((), fed.w.dtype), None, True, {}
        answers = fed.ask(self.measure, drawn.cohort, when=drawn.available)
        constraint, found = fed.constraint, {}
        if isinstance(constraint, Several):
            above, focuses = constraint.excesses(answers, drawn.weights)
            estimate = jnp.max(above)
            violations = above - self.feasible_up_to
            if isinstance(self.tolerance, Adaptive):
                deviations = constraint.deviations(answers, fed.clients)
                margins = self.tolerance.margin(deviations, answers.count, len(drawn.cohort))
                violations, found = violations + margins, {"margin": jnp.max(margins)}
            shares = shares_among(self.among, violations, fed.round)
            focus, violation = constraint.focus(shares, focuses), jnp.max(violations)
        else:
            estimate, focus = constraint.combine(answers, drawn.weights)
            violation = estimate - self.feasible_up_to
            if isinstance(self.tolerance, Adaptive):
                deviation = constraint.deviation(answers, fed.clients)
                margin = self.tolerance.margin(deviation, answers.count, len(drawn.cohort))
                violation, found = violation + margin, {"margin": margin}
        sigma = self.switching(violation)
        info = {"switch": sigma, "constraint_estimate": estimate} | found
        return sigma, focus, answers.any(), info

    def average(self, server: Server) -> Vector | np.ndarray | None:
        return server.average if server.weight > 0 else None

    # On a client

    def measure(self, client: Client, residual: Vector | None) -> tuple[Vector | None, PyTree]:
        return residual, client.measure(client.w)

    def improve(
        self, client: Client, residual: Vector | None, message: tuple[Float[Array, ""], PyTree]
    ) -> tuple[Vector | None, Packet]:
        sigma, focus = message

        def direction(w: Vector, key: PRNGKey) -> Vector:
            return self.direction(client, w, sigma, focus, key)

        total = self.descend(client, direction, self.follows(client, sigma))  # Δ_j
        return self.compress(client, residual, total)  # v_j = C_j(e_j + Δ_j), e_j ← e_j + Δ_j − v_j

    def follows(self, client: Client, sigma: Float[Array, ""]) -> Follows | None:
        """Return what ν is, where it is one gradient; None where it is a blend of two."""
        if client.unconstrained:
            return Follows()
        return Follows(sigma=sigma) if isinstance(self.switching, Hard) else None

    def direction(
        self, client: Client, w: Vector, sigma: Float[Array, ""], focus: PyTree, key: PRNGKey
    ) -> Vector:
        """Return ν = (1 − σ)∇f_j(w) + σ∇g_j(w); the problem's client may define another one."""
        return client.direction(w, sigma, focus, key)
