"""IPP-ConEx: constraint extrapolation inside an inexact proximal point loop.

Paper: Boob, Deng and Lan, "Stochastic first-order methods for convex and nonconvex functional
constrained optimization" (Mathematical Programming, 2023), Algorithm 1 (ConEx) and section 3
(inexact proximal point for problems that are not convex).

    minimise f(x)   subject to   g(x) ≤ ε,   x in X,   f and g μ_f- and μ_g-weakly convex.

Around a centre c, the subproblem

    minimise f(x) + μ_f ‖x − c‖²   subject to   g(x) + μ_g ‖x − c‖² ≤ ε

is strongly convex. ConEx takes K primal-dual steps on it, each with the constraint linearised at
the point before and extrapolated:

    ℓ_t = g(x_{t−1}) + ⟨∇g(x_{t−1}), x_t − x_{t−1}⟩ + μ_g ‖x_t − c‖² − ε,
    y ← [y + ((1 + θ) ℓ_t − θ ℓ_{t−1}) / τ]₊,
    x_{t+1} = argmin over X of ⟨∇f(x_t) + y ∇g(x_t), x⟩ + (μ_f + y μ_g) ‖x − c‖² + (η/2) ‖x − x_t‖².

The mean of x_1 … x_K is the next centre, from which the next subproblem starts, with the last y
(ConEx starts from any y; one from 0 each time leaves the mean an O(1/K) violation for ever).

| here | paper | |
|---|---|---|
| `step_size` | 1/η | |
| `dual_step` | 1/τ | |
| `extrapolation` | θ | 1 in the convex case |
| `proximal`, `constraint_proximal` | μ_0, μ_1 | of f and of g; at least their weak convexity |
| `steps` | T | ConEx steps on each subproblem (K above) |
| `tolerance` | | ε |

A step is a round: clients send what they know of g, and the two gradients; all else is the
server's. With everyone taking part and a constraint that is a mean, the numbers are those of the
paper's centralized method; with one client (`problem.pooled()`), for every constraint.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedsolve.algorithms.participating import Participating
from fedsolve.compression.compressors import Identity
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, Schedule, at, check_count, check_positive, scalar, static
from fedsolve.problem.client import Client
from fedsolve.problem.problem import Problem
from fedsolve.types import Info, PRNGKey, PyTree, Vector

Number = Float[Array, ""]


class Server(eqx.Module):
    """The subproblem's centre, its dual y, and what the next step needs of the last one."""

    step: Int[Array, ""]  # t
    centre: Vector
    dual: Number
    last: Vector  # x_{t−1}
    value: Number  # g(x_{t−1})
    slope: Vector  # ∇g(x_{t−1})
    linear: Number  # ℓ_{t−1}
    mean: Vector  # of the subproblem's x_1 … x_t


class IPPConEx(Participating):
    """Inexact proximal point method with constraint extrapolation: a primal-dual baseline.

    Args:
        step_size: 1/η, a number or a schedule.
        tolerance: ε.
        dual_step: 1/τ, the step of the dual variable.
        extrapolation: θ.
        proximal: μ_0, of f; at least its weak convexity.
        constraint_proximal: μ_1, of g; at least its weak convexity.
        steps: T, the ConEx steps on each subproblem.
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
        >>> run = fs.solve(problem, fs.IPPConEx(0.1, steps=2), rounds=4)
        >>> run.history["dual"].shape
        (4,)
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    tolerance: Scalar = eqx.field(converter=scalar("tolerance"), default=0.0)
    dual_step: Scalar = eqx.field(converter=scalar("dual_step"), default=1.0)
    extrapolation: Scalar = eqx.field(converter=scalar("extrapolation"), default=1.0)
    proximal: Scalar = eqx.field(converter=scalar("proximal"), default=1.0)
    constraint_proximal: Scalar = eqx.field(converter=scalar("constraint_proximal"), default=0.0)
    steps: int = static(10)

    def __check_init__(self):
        check_positive("step_size", self.step_size)
        check_positive("dual_step", self.dual_step)
        for name in ("tolerance", "extrapolation", "proximal", "constraint_proximal"):
            check_positive(name, getattr(self, name), zero=True)
        check_count("steps", self.steps)

    def check(self, problem: Problem) -> None:
        if problem.constraint is None:
            raise InvalidInput("IPPConEx is for problems with a constraint; this one has none.")
        super().check(problem)

    # On the server

    def init(self, w: Vector) -> Server:
        nothing, zero = jnp.zeros_like(w), jnp.zeros((), w.dtype)
        return Server(jnp.int32(0), w, zero, w, zero, nothing, zero, nothing)

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        assert fed.constraint is not None
        drawn, x, step = self.draw(fed, key), fed.w, server.step
        answers = fed.ask(self.measure, drawn.cohort, when=drawn.available)
        estimate, focus = fed.constraint.combine(answers, drawn.weights)
        when = answers.any() & drawn.available
        slopes = fed.ask(self.slopes, drawn.cohort, focus, when)
        heard = slopes.any()  # nobody: everything stays as it is
        slope_f, slope_g = slopes.mean(drawn.weights)

        first = step == 0  # of a subproblem: its centre is here, and there is no previous step
        centre = jnp.where(first, x, server.centre)
        value, slope = server.value, server.slope
        ahead = jnp.where(first, estimate, value + slope @ (x - server.last))
        linear = ahead + self.constraint_proximal * jnp.sum((x - centre) ** 2) - self.tolerance
        before = jnp.where(first, linear, server.linear)
        extrapolated = (1 + self.extrapolation) * linear - self.extrapolation * before
        dual = jnp.maximum(server.dual + self.dual_step * extrapolated, 0)

        pull = 2 * (self.proximal + dual * self.constraint_proximal)
        eta = 1 / at(self.step_size, fed.round)
        moved = fed.project((eta * x + pull * centre - slope_f - dual * slope_g) / (eta + pull))
        mean = jnp.where(first, moved, server.mean + (moved - server.mean) / (step + 1))
        after = jnp.where(step == self.steps - 1, mean, moved)

        turn = (step + 1) % self.steps
        state = Server(turn, centre, dual, x, estimate, slope_g, linear, mean)
        state = jax.tree.map(lambda new, old: jnp.where(heard, new, old), state, server)
        fed.publish(Identity()(jnp.where(heard, after - x, 0), key))
        self.learn(fed, slope_f + dual * slope_g)
        return state, drawn.info | {"dual": state.dual, "constraint_estimate": estimate}

    # On a client

    def measure(self, client: Client, state: None) -> tuple[None, PyTree]:
        return state, client.measure(client.w)

    def slopes(self, client: Client, state: None, focus: PyTree = None) -> tuple[None, PyTree]:
        w, key = client.w, client.key
        return state, (client.grad(w, key), client.constraint_grad(w, focus=focus, key=key))
