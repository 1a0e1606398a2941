"""FedADMM: federated learning via inexact ADMM.

Paper: S. Zhou and G. Y. Li, "Federated Learning via Inexact ADMM", Algorithm 1 with the inner
iteration (15).

    minimise f(w) = Σ α_i f_i(w_i)   subject to   w_i = w,   α_i = 1/m

| here | paper | |
|---|---|---|
| `participants` | ρm | or `selection` and `availability` |
| `local_iterations` | k_0 | iterations between two averagings |
| `penalty` | σ_i | a number c: σ_i = c α_i r_i; `"theory"`: c = 3 (Theorem 4.1); an array: σ_i |
| `accuracy` | ε_i^0 | k_0² unless given |
| `decay` | ν_i | ε_i ← ν_i ε_i in every iteration (5) |
| `inner_steps` | κ | the most steps (15); None: until the residual (6) is small enough |
| `lipschitz` | r_i | of ∇f_i; estimated where not given (bounded for `penalty="theory"`) |
| `dual_start` | π_i^0 | `"zero"` as in the experiments, `"gradient"`: −α_i ∇f_i(w^0), Algorithm 1 |
| `dual` | π_i | kept by client i |
| `sent` | z_i | σ_i w_i + π_i, as the server has it |
| `total`, `penalties` | Σ z_i, σ = Σ σ_i | kept by the server: its memory does not grow with m |

A round is k_0 iterations of the participants, and then the averaging (4) of all clients' last z_i.
So w after a round is an average, and the number of rounds is the number of averagings. (The
averaging of the z_i^0 is part of the initialization: it gives w^0 itself if π_i^0 = 0.)

The iterations are in `inexact_admm.py`, which computes ∇f_i(w) once for all of them.

With weights that are part of the problem (`Strategic`), α_i = p_i, which may change from round to
round. Divided by α_i, a client's augmented Lagrangian is f_i(w_i) + ⟨λ_i, w_i − w⟩ +
(s_i/2)‖w_i − w‖², with λ_i = π_i/α_i and s_i = σ_i/α_i: α_i is only in the averaging,
w = Σ α_i(s_i w_i + λ_i) / Σ α_i s_i. So a participant keeps λ_i and s_i, takes the new α_i, and
sends the changes of z_i = α_i(s_i w_i + λ_i) and σ_i = α_i s_i. If α converges, a fixed point has
λ_i = −∇f_i(w) and Σ α_i ∇f_i(w) = 0. An absent client has the α_i of its last answer.

Beyond the paper, in the same terms:

- With a term h(w), (4) is argmin h(w) + (σ/2)‖w − (1/σ) Σ z_i‖²: its proximal operator at the mean.
- Residuals and the augmented Lagrangian: `admm_residuals.py`.
- Penalties that change: a participant takes its new σ_i, keeps π_i, and sends the changes of z_i
  and σ_i. So w stays the average (4) with the σ_i that clients last sent.
- The exact solution of (6) for a quadratic f_i: `exact_admm.py`.
- Late answers: (4) has the z_i of the first m_0 answers of the round, and the others' from the next
  round on. A late z_i was computed at the w of the round in which the client was asked.
"""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from fedsolve.algorithms.admm_residuals import own_part, residuals
from fedsolve.algorithms.admm_state import Balanced, Local, Number, Numbers, Server, with_share
from fedsolve.algorithms.balancing import ResidualBalancing
from fedsolve.algorithms.curvature import least_steps, smoothness_of
from fedsolve.algorithms.exact_admm import ExactIterations, check_quadratic
from fedsolve.algorithms.inexact_admm import InexactIterations
from fedsolve.algorithms.participating import Participating
from fedsolve.algorithms.regularizers import Regularizer
from fedsolve.compression.compressors import Compressor, Identity
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import Scalar, check_count, check_kind, check_positive, scalar, static
from fedsolve.participation.availability import FirstAnswers
from fedsolve.participation.weighting import Weighting
from fedsolve.problem.client import Client
from fedsolve.problem.domains import Box, WholeSpace
from fedsolve.problem.problem import Problem
from fedsolve.types import Cohort, Flag, Flags, Info, PRNGKey, Vector

Count = Int[Array, ""] | Int[np.ndarray, ""]


class FedADMM(Participating):
    """Inexact ADMM with few averagings and partial participation (Algorithm 1).

    In every round the participants take k_0 iterations on their augmented Lagrangian and its dual.
    The server averages z_i = σ_i w_i + π_i over all clients, absent ones with their last z_i. With
    a compressed uplink a client sends C(z_i − ẑ_i), where ẑ_i is what the server has of z_i: what
    is left out now is sent later.

    `selection=Cyclic(count)` is Scheme 4.1, `availability=FirstAnswers(count)` takes the first m_0
    answers. f is the plain mean over clients, so weights are used to select clients only; but those
    of `Strategic` are the α_i.

    Args:
        local_iterations: k_0, the iterations between two averagings.
        penalty: A number c for σ_i = c α_i r_i, `"theory"` for c = 3, or an array of the σ_i.
        accuracy: ε_i^0; None for k_0².
        decay: ν_i, by which ε_i is multiplied in every iteration.
        inner_steps: κ, at most this many steps (15) per iteration; None: until the residual (6) is
            small enough.
        lipschitz: r_i, one number or one for each client; None to estimate them from the Hessian
            at the start, by power iteration; for `penalty="theory"` by a bound that is too low with
            probability 1e-9 only.
        power_steps: The steps of the power iteration that estimates r_i; the bound takes twice as
            many products with the Hessian.
        dual_start: `"zero"`, as in the experiments, or `"gradient"`, as in Algorithm 1.
        variant: `"paper"`, or `"released"` for the inner test of the authors' released program: it
            stops where ‖α_i∇f_i(v') + π_i + σ_i(v − w)‖² < n ε_i, with the gradient at the v'
            before the step (15) to v.
        uplink: The compressor of the clients, which must be contractive.
        solver: `"steps"` for (15), or `"exact"` for the solution of (6) by a Cholesky factor, where
            every f_i is quadratic. It needs a matrix of n² numbers for each participant.
        regularizer: A term h(w) that is added to f, such as `fs.L1`; the domain must be a `Box` or
            the whole space. The history has h(w) as `regularizer`, and f as `objective`.
        residuals: Whether to record `primal_residual`, `dual_residual` and `augmented_lagrangian`.
            All clients are asked for five numbers, one of them f_i(w_i), after every round.
        balance: How penalties follow the residuals, an `fs.ResidualBalancing`; None for fixed ones.
            `penalty_scale` in the history is what the first penalties are multiplied by.
        late: `"lost"`, or `"next"` to take the answers that `availability=FirstAnswers(m_0)` does
            not wait for in the next round.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> algorithm = fs.FedADMM(local_iterations=5, participants=2)
        >>> run = fs.solve(problem, algorithm, rounds=3)
        >>> run.history["cohort"].shape
        (3, 2)
    """

    begins_with_gradients: ClassVar[bool] = True

    local_iterations: Count = eqx.field(converter=lambda k: _count(k), default=10)
    penalty: Scalar | Numbers | str = eqx.field(converter=lambda x: _penalty(x), default=0.2)
    accuracy: Scalar | None = None
    decay: Scalar = eqx.field(converter=scalar("decay"), default=0.95)
    inner_steps: int | None = static(3)
    lipschitz: Scalar | Numbers | None = eqx.field(converter=lambda x: _array(x), default=None)
    power_steps: int = static(30)
    dual_start: str = static("zero")
    variant: str = static("paper")
    uplink: Compressor = Identity()
    solver: str = static("steps")
    regularizer: Regularizer | None = eqx.field(converter=lambda x: _regularizer(x), default=None)
    residuals: bool = static(False)
    balance: ResidualBalancing | None = eqx.field(converter=lambda x: _balance(x), default=None)
    late: str = static("lost")

    def __check_init__(self):
        check_kind("uplink", self.uplink, Compressor)
        for name, known in (("solver", ("steps", "exact")), ("late", ("lost", "next"))):
            if (value := getattr(self, name)) not in known:
                listed = " or ".join(f'"{each}"' for each in known)
                raise InvalidInput(f"{name} must be {listed}, got {value!r}.")
        if self.late == "next" and not isinstance(self.availability, FirstAnswers):
            raise InvalidInput(
                'late="next" needs availability=FirstAnswers(m_0), which says who is late.'
            )
        check_count("power_steps", self.power_steps)
        if not self.follows_theory:
            check_positive("penalty", self.penalty)
        check_positive("decay", self.decay)
        if self.accuracy is not None:
            check_positive("accuracy", self.accuracy)
        if self.inner_steps is not None:
            check_count("inner_steps", self.inner_steps)
        if self.lipschitz is not None:
            check_positive("lipschitz", self.lipschitz)
        if self.dual_start not in ("zero", "gradient"):
            raise InvalidInput(f'dual_start must be "zero" or "gradient", got {self.dual_start!r}.')
        if self.variant not in ("paper", "released"):
            raise InvalidInput(f'variant must be "paper" or "released", got {self.variant!r}.')
        if self.variant == "released" and self.inner_steps is None:
            raise InvalidInput('variant="released" needs inner_steps; the program has 3.')
        if not self.uplink.contractive:
            raise InvalidInput(
                "The uplink must be contractive, as error feedback on z_i needs it: "
                f"{type(self.uplink).__name__} is unbiased (RandK(unbiased=False) would do)."
            )

    def check(self, problem: Problem) -> None:
        super().check(problem)
        least = least_steps(problem.dimension)
        if self.follows_theory and self.lipschitz is None and self.power_steps < least:
            raise InvalidInput(
                f"power_steps must be at least {least} for a safe bound on r_i with "
                f"{problem.dimension} parameters, got {self.power_steps}."
            )
        for name in ("penalty", "lipschitz"):
            if np.ndim(values := getattr(self, name)) and len(values) != problem.n:
                raise InvalidInput(
                    f"{name} has {len(values)} numbers, but there are {problem.n} clients."
                )
        if self.regularizer is not None and not isinstance(problem.domain, Box | WholeSpace):
            raise InvalidInput(
                "A regularizer needs a box or the whole space as the domain: the projection on "
                "another set, after its proximal operator, is not that of both together."
            )
        weighted = type(self.weighting).objective_weights is not Weighting.objective_weights
        if weighted and self.balance is not None:
            raise InvalidInput(
                f"balance cannot be used with {type(self.weighting).__name__}: weights that change "
                "scale the penalties, too."
            )
        if self.solver == "exact":
            check_quadratic(problem)

    # On the server

    def init(self, w: Vector) -> Server:
        none = jnp.zeros((), w.dtype)
        return Server(
            jnp.zeros_like(w),
            none,
            jnp.int32(0),
            scale=None if self.balance is None else jnp.ones((), w.dtype),
            late=(jnp.zeros_like(w), none) if self.late == "next" else None,
        )

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        drawn = self.draw(fed, key)
        shares = self.objective_weights(server, fed.participation)  # None: 1/m
        server, before = self.initialize(fed, server, shares), fed.w
        message = shares if server.scale is None else Balanced(server.scale)
        first, info = None, dict(drawn.info)
        if server.late is not None:
            info["on_time"] = first = self.on_time(fed, drawn.cohort, drawn.available, key)
        replies = fed.ask(
            self.improve, drawn.cohort, message, when=drawn.available, waits_for=first
        )

        def changes(which: Flags | None = None) -> tuple[Vector, Number | int]:
            weights = None if which is None else jnp.asarray(which, fed.w.dtype)
            found = replies.sum(weights)
            return found if message is not None else (found, 0)

        late = None
        if first is None:
            moved, penalties = changes()
        else:
            assert server.late is not None
            waiting, late = server.late, changes(~first)
            late = late[0], jnp.asarray(late[1], fed.w.dtype)
            moved, penalties = jax.tree.map(jnp.add, changes(first), waiting)
        server = Server(
            server.total + moved, server.penalties + penalties, server.joined, server.scale, late
        )
        self.publish(fed, server)
        self.learn(fed, before - fed.w)
        if self.regularizer is not None:
            info["regularizer"] = self.regularizer(fed.w)
        if self.residuals or self.balance is not None:
            scale, found = self.measure(fed, server, before)
            server = eqx.tree_at(lambda s: s.scale, server, scale) if self.balance else server
            info |= found
        return server, info

    def answering(self, fed: Federation, cohort: Cohort, up: Flags, key: PRNGKey) -> Flags:
        first = super().answering(fed, cohort, up, key)
        return up if self.late == "next" else first

    def on_time(self, fed: Federation, cohort: Cohort, up: Flag | Flags, key: PRNGKey) -> Flags:
        """Return which clients of the cohort are among the first m_0 to answer."""
        return super().answering(fed, cohort, jnp.asarray(up), key)

    def measure(
        self, fed: Federation, server: Server, before: Vector
    ) -> tuple[Number | None, Info]:
        """Ask for the residuals at the new w; return the next scale of penalties, and the entry."""
        found = fed.ask(self.tell, fed.everyone).sum()
        each, info = residuals(found, fed.w, before, fed.clients)
        extra = 0 if self.regularizer is None else self.regularizer(fed.w)
        info["augmented_lagrangian"] = found["lagrangian"] + extra
        if self.balance is None or server.scale is None:
            return None, info
        info["penalty_scale"] = server.scale
        scale = self.balance.next(server.scale, each.relative, each.relative_dual, fed.round)
        return scale, info

    def initialize(self, fed: Federation, server: Server, shares: Numbers | None) -> Server:
        """Ask all clients for σ_i and z_i^0 before the first iteration, until all have answered."""
        missing = server.joined < fed.clients
        share = jnp.asarray(1 / fed.clients, fed.w.dtype) if shares is None else shares
        penalties, duals, fresh = fed.ask(self.begin, fed.everyone, share, when=missing).sum()
        total = server.total + penalties * fed.w + (0 if duals is None else duals)
        joined = server.joined + jnp.asarray(fresh, jnp.int32)
        server = Server(total, server.penalties + penalties, joined, server.scale, server.late)
        if self.dual_start == "gradient":
            self.publish(fed, server, missing)
        return server

    def publish(self, fed: Federation, server: Server, when: Flag = True) -> None:
        """Publish the average (4): w = (1/σ) Σ z_i, in X; with h, its proximal operator there."""
        heard = server.penalties > 0
        penalties = jnp.where(heard, server.penalties, 1)
        mean = server.total / penalties
        w = fed.project(
            mean if self.regularizer is None else self.regularizer.prox(mean, 1 / penalties)
        )
        fed.publish(Identity()(jnp.where(heard, w - fed.w, 0)), when=when)

    # On a client

    def init_client(self, w: Vector) -> Local:
        nothing, none = jnp.zeros_like(w), jnp.zeros((), w.dtype)
        return Local(nothing, nothing, none, none, none, none)

    def begin(
        self, client: Client, state: Local, share: Number | Numbers
    ) -> tuple[Local, tuple[Number, Vector | None, Bool[Array, ""]]]:
        """Reply with σ_i, π_i^0 (None if it is 0), and whether this client is new."""
        share = jnp.asarray(share[client.index] if share.ndim else share)
        smoothness = share * smoothness_of(
            client, self.lipschitz, safe=self.follows_theory, steps=self.power_steps
        )
        penalty = self.first_penalty(client, smoothness)
        dual = jnp.zeros_like(client.w)
        if self.dual_start == "gradient":
            dual = -share * client.grad(client.w)
        accuracy = self.local_iterations**2 if self.accuracy is None else self.accuracy
        accuracy = jnp.asarray(accuracy, dual.dtype)
        started = Local(dual, penalty * client.w + dual, accuracy, share, smoothness, penalty)
        new = state.penalty == 0
        moved = jax.tree.map(lambda now, old: jnp.where(new, now, old), started, state)
        sends_dual = jnp.where(new, dual, 0) if self.dual_start == "gradient" else None
        return moved, (jnp.where(new, penalty, 0), sends_dual, new)

    def first_penalty(self, client: Client, smoothness: Number) -> Number:
        """Return σ_i as given, from α_i r_i."""
        given = jnp.asarray(3 if self.follows_theory else self.penalty, client.w.dtype)
        return given[client.index] if given.ndim else given * smoothness

    def tell(self, client: Client, state: Local) -> tuple[Local, dict[str, Number]]:
        """Reply with this client's part of the residuals and of the augmented Lagrangian."""
        return state, own_part(client, state)

    @property
    def follows_theory(self) -> bool:
        """Whether σ_i must satisfy Theorem 4.1, so that r_i must not be less than it is."""
        return isinstance(self.penalty, str)

    def improve(
        self, client: Client, state: Local, message: Numbers | Balanced | None = None
    ) -> tuple[Local, Packet | tuple[Packet, Number]]:
        """Take k_0 iterations (5)-(8); send the change of z_i, and of σ_i if that may change."""
        before = state.penalty
        if isinstance(message, Balanced):
            scaled = message.scale * self.first_penalty(client, state.smoothness)
            scaled = jnp.where(before > 0, scaled, 0)
            state = eqx.tree_at(lambda own: own.penalty, state, scaled)
        elif message is not None:
            state = with_share(state, jnp.asarray(message[client.index]))
        slope = state.share * client.grad(client.w)
        penalty = jnp.where(state.penalty > 0, state.penalty, 1)
        first = slope + state.dual  # s
        dual, local, accuracy = self.iterations(client, state, penalty, first, slope)
        joined = state.penalty > 0  # otherwise the server does not count this client yet
        change = jnp.where(joined, penalty * local + dual - state.sent, 0)
        packet = client.limited(self.uplink(change, jax.random.fold_in(client.key, 0)))
        moved = Local(
            dual=jnp.where(joined, dual, state.dual),
            sent=state.sent + packet.dense(),
            accuracy=accuracy,
            share=state.share,
            smoothness=state.smoothness,
            penalty=state.penalty,
        )
        return moved, packet if message is None else (packet, state.penalty - before)

    @property
    def iterations(self) -> InexactIterations | ExactIterations:
        """How a participant takes its k_0 iterations."""
        local_iterations = jnp.asarray(self.local_iterations)
        if self.solver == "exact":
            return ExactIterations(local_iterations)
        released = self.variant == "released"
        return InexactIterations(local_iterations, self.decay, self.inner_steps, released)


def _count(value: object) -> Count:
    """Convert k_0 to an array, so that a new value needs no new compilation."""
    if isinstance(value, np.ndarray | jax.Array):
        return value
    check_count("local_iterations", value)
    return np.asarray(value, np.int32)


def _penalty(value: Any) -> Scalar | Numbers | str:
    """Convert a number or an array; keep the word "theory"."""
    if isinstance(value, str) and value == "theory":
        return value
    return _array(value) if np.ndim(value) else scalar("penalty")(value)


def _regularizer(value: object) -> Regularizer | None:
    return None if value is None else check_kind("regularizer", value, Regularizer)


def _balance(value: object) -> ResidualBalancing | None:
    return None if value is None else check_kind("balance", value, ResidualBalancing)


def _array(value: object) -> Any:
    """Convert a list to an array; leave other values as they are."""
    return np.asarray(value, float) if isinstance(value, list | tuple) else value
