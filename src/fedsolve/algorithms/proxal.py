"""ProxAL: a proximal augmented Lagrangian method for convex global and local constraints.

Paper: He, Peng and Sun, "Federated Learning with Convex Global and Local Constraints" (TMLR 2024):
Algorithm 1 (proximal augmented Lagrangian), whose subproblems Algorithm 2 (inexact ADMM) solves.

    minimise Σ_j f_j(w)   subject to   c_j(w) ≤ 0 for every client j,   w in X.

Around w^k, with multipliers μ_j of the clients, the subproblem is to minimise Σ_j P_j(w) + P_0(w),

    P_j(w) = f_j(w) + [μ_j + β c_j(w)]₊² / (2β) + κ/2 ‖w − w^k‖²,   P_0(w) = κ/2 ‖w − w^k‖²,

with κ = 1/((n + 1)β), over w in X. ADMM gives each client a copy u_j of w and a dual λ_j:

    w   = argmin over X of P_0(w) + Σ_j ρ/2 ‖u_j + λ_j/ρ − w‖²,
    u_j ≈ argmin of P_j(u) + ⟨λ_j, u − w⟩ + ρ/2 ‖u − w‖²,   λ_j ← λ_j + ρ (u_j − w),

from u_j = w^k, λ_j = −∇P_j(w^k). After K such steps w^{k+1} = w and μ_j ← [μ_j + β c_j(w^{k+1})]₊.

| here | paper | |
|---|---|---|
| `beta` | β | of the augmented Lagrangian |
| `rho` | ρ_i | of ADMM, the same for all clients |
| `steps` | | K; the paper stops ADMM at an accuracy τ_k |
| `local_steps`, `step_size` | ε_t | gradient steps on u_j; the paper asks for an accuracy |
| `tolerance` | | ε, added to what a constraint may be |
| `each_client` | local constraints | c_j = g_j − ε: every client must satisfy its own |
| otherwise | global constraint | (1/n) Σ g_j ≤ ε, see below |
| `multiplier` | μ_j | the mean over clients, in the history |

The paper's global constraint is on data that the server holds. Here the clients hold the data of
(1/n) Σ g_j ≤ ε, so it is split: client j has a variable s_j beside w, and the local constraint
g_j(w) − s_j ≤ 0, which is convex; the server's X has Σ s_j = n ε. That is the paper's method in the
variables (w, s). A client minimises over its s_j in closed form, and the server's step is

    s_j = (ρ s̃_j + κ s_j^k − ρ ((1/n) Σ s̃_i − ε)) / (ρ + κ),   s̃_j = s_j + its dual / ρ,

so that one number goes down, and client j works out its own s_j. All μ_j then have one limit, the
multiplier of g in min (1/n) Σ f_j.

A round is one step of ADMM. If answers are lost, the server asks those clients again in the next
round, and the step ends when all have answered: losses take time, and change no number.
"""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedsolve.algorithms.base import Algorithm
from fedsolve.compression.compressors import Identity
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import (
    Scalar,
    Schedule,
    at,
    check_count,
    check_flag,
    check_positive,
    scalar,
    static,
)
from fedsolve.problem.client import Client
from fedsolve.problem.constraints import Mean
from fedsolve.problem.problem import Problem
from fedsolve.types import Flags, Info, PRNGKey, PyTree, Round, Vector

Real = Float[Array, ""]
Message = tuple[Int[Array, ""], Real, Real]  # k, (1/n) Σ s̃_i − ε, κ


class Server(eqx.Module):
    """Where the subproblem is, and the means over clients of u_j + λ_j/ρ and of s̃_j − ε.

    `slack` is of the step before; `copies` and `gathered` have the answers so far of this one.
    """

    step: Int[Array, ""]  # of ADMM
    outer: Int[Array, ""]  # k, from 1
    centre: Vector
    copies: Vector
    slack: Real
    gathered: Real


class Kept(NamedTuple):
    """A client's copy, its dual, the subproblem's centre (of w and of s_j), and μ_j."""

    copy: Vector
    dual: Vector
    centre: Vector
    slack: Real
    slack_dual: Real
    slack_centre: Real
    multiplier: Real
    outer: Int[Array, ""]


class ProxAL(Algorithm):
    """Proximal augmented Lagrangian method, with inexact ADMM for its subproblems.

    Every client takes part in every round, and messages are not compressed: the paper's convergence
    rests on both. f_j and g_j should be convex and smooth.

    Args:
        step_size: The step of the local gradient steps, a number or a schedule.
        tolerance: ε.
        beta: β, of the augmented Lagrangian.
        rho: ρ, of ADMM.
        steps: K, the steps of ADMM on a subproblem.
        local_steps: The gradient steps of a client in a round.
        each_client: Whether every client must satisfy its own g_j(w) ≤ ε, in place of their mean.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: 0.5 * jnp.sum((w - data["target"]) ** 2),
        ...     clients={"target": jnp.eye(3)},
        ...     params=jnp.zeros(3),
        ...     constraint=lambda w, data: jnp.sum(w) - 0.5,
        ... )
        >>> run = fs.solve(problem, fs.ProxAL(0.3, steps=5, local_steps=5), rounds=200)
        >>> round(float(run.params.sum()), 3), round(float(run.history["multiplier"][-1]), 2)
        (0.5, 0.17)
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    tolerance: Scalar = eqx.field(converter=scalar("tolerance"), default=0.0)
    beta: Scalar = eqx.field(converter=scalar("beta"), default=1.0)
    rho: Scalar = eqx.field(converter=scalar("rho"), default=1.0)
    steps: int = static(10)
    local_steps: int = static(10)
    each_client: bool = static(False)

    def __check_init__(self):
        for name in ("step_size", "beta", "rho"):
            check_positive(name, getattr(self, name))
        check_positive("tolerance", self.tolerance, zero=True)
        check_count("steps", self.steps)
        check_count("local_steps", self.local_steps)
        check_flag("each_client", self.each_client)

    def check(self, problem: Problem) -> None:
        if not isinstance(problem.constraint, Mean):
            raise InvalidInput(
                "ProxAL needs a constraint that is a mean over clients, given as a function g_j."
            )
        if problem.batch_size is not None:
            raise InvalidInput("ProxAL needs exact gradients: leave out batch_size.")
        if problem.trains_itself or problem.keeps_own or problem.state is not None:
            raise InvalidInput(
                "ProxAL takes its own local steps on parameters that all clients share: it has no "
                "use for a training loop, personal parameters or a state of the loss."
            )

    # On the server

    def init(self, w: Vector) -> Server:
        zero, none = jnp.zeros((), w.dtype), jnp.zeros((), jnp.int32)
        return Server(none, none, w, w, zero, zero)

    def init_participation(self, w: Vector, clients: int) -> Flags:
        """Return whose answer to this step is missing."""
        return jnp.ones(clients, bool)

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        begins = server.step == 0
        outer = server.outer + begins
        centre = jnp.where(begins, fed.w, server.centre)
        kappa = jnp.asarray(1 / ((fed.clients + 1) * self.beta), fed.w.dtype)
        message = outer, server.slack, kappa
        answers = fed.ask(self.improve, fed.everyone, message, when=fed.participation)
        copies = server.copies + answers.pick("copy").sum() / fed.clients
        gathered = server.gathered + answers.pick("slack").sum() / fed.clients
        missing = fed.participation & ~answers.arrived
        complete = ~jnp.any(missing)
        fed.participation = jnp.where(complete, True, missing)

        near = kappa / fed.clients
        w = fed.project((self.rho * copies + near * centre) / (self.rho + near))
        fed.publish(Identity()(jnp.where(complete, w - fed.w, 0), key))
        after = Server((server.step + 1) % self.steps, outer, centre, copies, gathered, gathered)
        waiting = eqx.tree_at(lambda kept: (kept.copies, kept.gathered), server, (copies, gathered))
        after = jax.tree.map(lambda new, old: jnp.where(complete, new, old), after, waiting)
        info = {"cohort": fed.everyone, "multiplier": answers.pick("multiplier").mean()}
        return after, info

    # On a client

    def init_client(self, w: Vector) -> Kept:
        zero, level = jnp.zeros((), w.dtype), jnp.asarray(self.tolerance, w.dtype)
        return Kept(w, 0 * w, w, level, zero, level, zero, jnp.zeros((), jnp.int32))

    def improve(self, client: Client, kept: Kept, message: Message) -> tuple[Kept, PyTree]:
        """Take a step of ADMM, or begin a subproblem if it is a new one."""
        outer, excess, kappa = message
        server_slack = self._server_slack(kept, excess, kappa)
        moved = jax.lax.cond(
            kept.outer != outer,
            lambda: self._begin(client, kept, server_slack, outer),
            lambda: self._step(client, kept, server_slack, kappa),
        )
        sent = {
            "copy": (moved.copy - kept.copy) + (moved.dual - kept.dual) / self.rho,
            "slack": (moved.slack - kept.slack) + (moved.slack_dual - kept.slack_dual) / self.rho,
            "multiplier": moved.multiplier,
        }
        return moved, sent

    def _server_slack(self, kept: Kept, excess: Real, kappa: Real) -> Real:
        """Return the server's s_j; ε where every client has its own constraint."""
        if self.each_client:
            return kept.slack
        pull = self.rho * (kept.slack - excess) + kept.slack_dual + kappa * kept.slack_centre
        return jnp.asarray(pull / (self.rho + kappa))

    def _begin(self, client: Client, kept: Kept, slack: Real, outer: Int[Array, ""]) -> Kept:
        """Move μ_j, unless it is the first subproblem, and start ADMM at w^k."""
        value, slope = jax.value_and_grad(client.measure)(client.w)
        moved = jnp.maximum(kept.multiplier + self.beta * (value - slack), 0)
        multiplier = jnp.where(kept.outer == 0, kept.multiplier, moved)
        weight = jnp.maximum(multiplier + self.beta * (value - slack), 0)
        dual = -(client.grad(client.w) + weight * slope)  # −∇P_j(w^k)
        slack_dual = 0 * weight if self.each_client else weight  # −∂P_j/∂s
        return Kept(client.w, dual, client.w, slack, slack_dual, slack, multiplier, outer)

    def _step(self, client: Client, kept: Kept, slack: Real, kappa: Real) -> Kept:
        """Minimise over u_j and s_j, and move their duals."""

        def best_slack(value: Real) -> tuple[Real, Real]:
            """Return the best s_j for a value of g_j, and [μ_j + β (g_j − s_j)]₊ there."""
            if self.each_client:
                return slack, jnp.maximum(kept.multiplier + self.beta * (value - slack), 0)
            pull, curve = kappa * kept.slack_centre + self.rho * slack, kappa + self.rho
            free = (pull - kept.slack_dual) / curve
            held = pull - kept.slack_dual + kept.multiplier + self.beta * value
            held = held / (curve + self.beta)
            weight = kept.multiplier + self.beta * (value - free)
            found = jnp.where(weight > 0, held, free)
            return found, jnp.maximum(kept.multiplier + self.beta * (value - found), 0)

        def descend(_: Round, u: Vector) -> Vector:
            value, slope = jax.value_and_grad(client.measure)(u)
            weight = best_slack(value)[1]
            step = client.grad(u) + weight * slope + kept.dual
            step += kappa * (u - kept.centre) + self.rho * (u - client.w)
            return u - at(self.step_size, client.round) * step

        copy = client.repeat(self.local_steps, descend, kept.copy)
        own_slack = best_slack(client.measure(copy))[0]
        return kept._replace(
            copy=copy,
            dual=kept.dual + self.rho * (copy - client.w),
            slack=own_slack,
            slack_dual=kept.slack_dual + self.rho * (own_slack - slack),
        )
