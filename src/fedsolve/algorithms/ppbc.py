"""PPBC and PPBC+: partial participation with bias correction, under any selection of clients.

Paper: "Partial participation with bias correction" (under review, ICLR 2026), Algorithm 1 (PPBC)
and Algorithm 2 (PPBC+, clients that come and go).

    minimise f(x) = (1/M) Σ f_m(x)

or, with weights that are part of the problem (`Strategic`), Σ p_m f_m(x): p_m replaces 1/M.

| here | paper | |
|---|---|---|
| `step_size` | γ | |
| `momentum` | θ | `"theory"`: γLp²/2, Theorem 3.2 |
| `epoch_end` | p | iterations of an epoch: H ~ Geom(p), P(H = j) = p(1 − p)^j, j ≥ 0 |
| `weighting`, `cap` | π, α | weights on {π ≥ 0, Σπ = 1, π_m ≤ α/M} |
| `select_epoch`, `select_round` | R̂, R̃ | zero the weights of those not selected |
| `counting` | | what the others retain: π_m as in the paper, or see `SelectingTwice` |
| `availability` | η_m, q_m | with it, this is PPBC+ |
| `previous` | g^{k−1,H} | the sum of the last epoch's surrogates |
| `gathered` | Σ_h (1/M) ∇f_m | kept by client m, over this epoch |
| `sent` | Σ_h Σ_m π̃_m ∇f_m | what the server received in this epoch |

A round is one iteration of an epoch: every client that is up computes, those selected send. In the
paper client m keeps g_m = (1 − θ) Σ_h (1/M − π̃_m)∇f_m. Their sum is all that the server uses, and
it knows the part with π̃ itself, so clients need not be told π̃: they keep and send `gathered`.

A round that ends an epoch (`epoch_end` in the history; `epochs` counts them) also makes the next
one's first move, line 7; its parameters are the next epoch's start x^{k,0}, where the theorems
hold: measure there.
Empty epochs (H = 0) take no round: their only effect is to reset `previous`.

In PPBC+ a gradient has weight η_m/q_m, which keeps the expectation of line 17 only if π̃ does not
depend on this round's η. So all clients are asked for weights when an epoch begins: all of them
were reached just before, for their surrogates. R̃ of Algorithm 2 is the outage itself; a
`select_round` comes on top, and uses the weights of the epoch's start, whichever clients are up.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from fedsolve.algorithms.common import LocalTraining
from fedsolve.algorithms.guarantee import PPBCGuarantee
from fedsolve.algorithms.two_level import SelectingTwice
from fedsolve.compression.compressors import Identity
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.federation.replies import Replies
from fedsolve.fields import (
    Scalar,
    Schedule,
    at,
    check_count,
    check_momentum,
    check_probability,
    optional,
    scalar,
    static,
)
from fedsolve.local_updates.optimizers import Optimizer, as_optimizer
from fedsolve.participation.weighting import Weighting
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.problem.problem import Problem
from fedsolve.types import Info, PRNGKey, Round, Vector

SELECTING = ("weighting", "select_epoch", "select_round", "round_weighting", "cap", "counting")
SELECTING += ("availability",)


class Theory(eqx.Module):
    """θ = γLp²/2, as in Theorem 3.2."""


class Server(eqx.Module):
    """The server between two iterations."""

    x: Vector
    previous: Vector
    sent: Vector
    epoch: Int[Array, ""]
    done: Int[Array, ""]  # iterations of this epoch


class Kept(NamedTuple):
    """A client between two exchanges: its latest gradient, and what it gathered in which epoch."""

    latest: Vector
    gathered: Vector
    epoch: Int[Array, ""]


def _momentum(value: object) -> Scalar | Theory:
    """Convert a number or the word "theory"."""
    is_word = isinstance(value, str) and value == "theory"
    return Theory() if is_word else scalar("momentum")(value)


class PPBC(LocalTraining, SelectingTwice):
    """Partial participation with bias correction, under any selection of clients.

    However biased the selection is, clients accumulate what it leaves out, and the server adds it
    once per epoch. Clients are selected for an epoch and again in every round (`SelectingTwice`).
    With an `availability` this is PPBC+: gradients have weight 1/q_m while a client is up.

    The options `epoch_length`, `counting="uniform"` and `surrogate="current"` are those of the
    authors' code. With `surrogate="current"`, θ multiplies what this epoch left out so far, from
    the second epoch on, and nothing is added at its end. All clients then answer in every round:
    this is not partial participation.

    Args:
        step_size: γ, a number or a schedule.
        momentum: θ; `"theory"` is γLp²/2. A fixed θ leaves an error that does not vanish with γ; 0
            is safe.
        epoch_end: p, the probability that an epoch ends after a round.
        smoothness: L, for `momentum="theory"`.
        local_steps, local_epochs: The local steps of a client in a round, or its passes over its
            samples; with more than one step, a client's change replaces its gradient.
        local_optimizer: The optimizer of the local steps (`fs.SGD`, `fs.Adam` or one of optax);
            None for gradient descent.
        epoch_length: A fixed number of rounds in an epoch, instead of `epoch_end`.
        surrogate: `"previous"`, as in the paper, or `"current"`, as in the authors' code.
        correction: Whether there is a correction; without one it is FedAvg with the same selection.
        weighting, availability, select_epoch, select_round, round_weighting, cap, counting: Which
            clients take part; see `SelectingTwice`.
        participants, selection: Not used; see `select_epoch`.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> algorithm = fs.PPBC(
        ...     0.05, weighting="GradientNorm", select_epoch=fs.participation.Top(2)
        ... )
        >>> run = fs.solve(problem, algorithm, rounds=3)
        >>> run.history["cohort"].shape
        (3, 2)
    """

    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    momentum: Scalar | Theory | str = eqx.field(converter=_momentum, default=0.0)
    epoch_end: Scalar = eqx.field(converter=scalar("epoch_end"), default=0.2)
    smoothness: Scalar | None = eqx.field(converter=optional(scalar("smoothness")), default=None)
    local_steps: int = static(1)
    local_optimizer: Optimizer | None = eqx.field(converter=as_optimizer, default=None)
    epoch_length: int | None = static(None)
    surrogate: str = static("previous")
    correction: bool = static(True)
    # The guarantee of a theorem for exactly these numbers; `dataclasses.replace` drops it.
    guarantee: PPBCGuarantee | None = eqx.field(static=True, init=False, default=None)

    def __check_init__(self):
        check_probability("epoch_end", self.epoch_end)
        if self.epoch_length is not None:
            check_count("epoch_length", self.epoch_length)
        if self.surrogate not in ("previous", "current"):
            raise InvalidInput(
                f'surrogate must be "previous" or "current", got {self.surrogate!r}.'
            )
        if isinstance(self.momentum, Theory):
            if self.smoothness is None:
                raise InvalidInput('momentum="theory" needs the smoothness L: θ = γLp²/2.')
        else:
            check_momentum("momentum", self.momentum)
            self._warn()

    def _warn(self) -> None:
        """Warn if θ is larger than theory allows."""
        theta, p, gamma = self.momentum, self.epoch_end, self.step_size
        smoothness = 0.0 if self.smoothness is None else self.smoothness
        if self.epoch_length is not None or not (isinstance(theta, float) and isinstance(p, float)):
            return
        if not (isinstance(gamma, float) and isinstance(smoothness, float)):
            return
        if gamma <= 0:
            return  # an error, which `LocalTraining` raises
        most = min(gamma * (smoothness or np.inf), 1.0) * p**2 / 2  # no step is more than 1/L
        if theta > most * (1 + 1e-9):
            warnings.warn(
                f"momentum {theta:g} is out of proportion to the step size: theory wants "
                f"θ ≤ γLp²/2, here at most {most:.3g}; a larger one leaves an error that does not "
                "vanish with the step size.",
                stacklevel=2,
            )

    def check(self, problem: Problem) -> None:
        super().check(problem)
        danger = None if self.availability is None else self.availability.risk(problem.n)
        if danger is not None:
            warnings.warn(f"PPBC+ weights gradients by 1/q_m, and {danger}.", stacklevel=2)

    @classmethod
    def from_theory(
        cls,
        problem: Problem,
        *,
        epochs: int | None = None,
        accuracy: float | int | None = None,
        epoch_end: float | int | None = None,
        strongly_convex: bool = False,
        **options: Any,
    ) -> PPBC:
        """Take γ, θ and p from the theorem that covers the case.

        The theorem's guarantee is then `guarantee`. Its `rounds` and `stop` are for `fs.solve`;
        `fs.theory.ppbc_certificate` compares runs with it.

        Args:
            problem: The problem, without a constraint, on all of R^d.
            epochs: K. Give this or `accuracy`.
            accuracy: ε. K is then such that the bound is at most ε².
            epoch_end: p; by default C/M, as in the corollaries.
            strongly_convex: Whether f is, for Theorem 3.4 or E.6 instead of 3.2 or E.2.
            options: Which clients are selected and up (`weighting`, `select_epoch`, `cap`,
                `availability`, …; see `SelectingTwice`), and constants by their names in
                `fs.theory.ppbc` (`smoothness`, `delta_1`, `noise`, `gap`, …). Constants that are
                not given are estimated at `points` points; `guarantee.unchecked` lists them.

        Returns:
            The algorithm.

        Raises:
            InvalidInput: If no theorem covers the case.

        Example:
            >>> import fedsolve as fs
            >>> import jax.numpy as jnp
            >>> problem = fs.Problem(
            ...     objective=lambda w, data: 0.5 * jnp.sum((w - data["target"]) ** 2),
            ...     clients={"target": jnp.eye(4)},
            ...     params=jnp.zeros(4),
            ... )
            >>> algorithm = fs.PPBC.from_theory(
            ...     problem, epochs=1000, gap=0.5, select_epoch=fs.participation.Random(2)
            ... )
            >>> algorithm.guarantee.theorem, float(algorithm.epoch_end)
            ('PPBC, Theorem 3.2', 0.5)
        """
        from fedsolve.theory.ppbc_runs import ppbc_for  # theory builds on algorithms

        selecting = {name: options.pop(name) for name in SELECTING if name in options}
        promise = ppbc_for(
            problem,
            cls(1.0, **selecting),
            epochs=epochs,
            accuracy=accuracy,
            epoch_end=epoch_end,
            strongly_convex=strongly_convex,
            **options,
        )
        algorithm = cls(promise.step_size, 0.0, promise.epoch_end, **selecting)
        object.__setattr__(algorithm, "momentum", promise.momentum)  # the theorem's, so no warning
        object.__setattr__(algorithm, "guarantee", promise)  # not an argument of `cls`
        return algorithm

    @property
    def is_as_published(self) -> bool:
        """Whether this is Algorithm 1 or 2, for the mean over clients, with gradient steps."""
        plain = self.correction and self.surrogate == "previous" and self.epoch_length is None
        steps = self.local_steps == 1 and self.local_optimizer is None
        steps = steps and self.local_epochs is None
        equal = type(self.weighting).objective_weights is Weighting.objective_weights
        return plain and steps and equal and not callable(self.step_size)

    @property
    def keeps(self) -> bool:
        """Whether clients accumulate what the selection leaves out of their gradients."""
        return self.correction and self.surrogate == "previous"

    # On the server

    def init(self, w: Vector) -> Server:
        zero = jnp.zeros_like(w)
        return Server(w, zero, zero, jnp.int32(0), jnp.int32(0))

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        to_select, to_end = jax.random.split(key)
        up, after = self.draw_available(fed, jax.random.fold_in(to_select, 1))
        fed.participation = fed.participation._replace(availability=after)
        begins = server.done == 0
        self.choose_epoch(fed, begins, to_select)
        cohort, share = self.choose_round(fed, begins, to_select)
        gamma, theta = at(self.step_size, fed.round), self.theta(fed.round)

        when = (share > 0) & (up if isinstance(up, bool) else up[jnp.asarray(cohort)])
        previous = carried = server.previous
        if self.keeps:
            fed.ask(self.work, fed.everyone, server.epoch, when=up)
            answers = fed.ask(self.send, cohort, when=when)
            heard = answers.sum(share)
        elif self.correction:  # `previous` is this epoch's own sum, kept by the server
            answers = fed.ask(self.improve, fed.everyone, when=up)
            heard = answers.sum(jnp.zeros(fed.clients, share.dtype).at[cohort].set(share))
            previous = previous + (1 - theta) * (self.target(fed, answers) - heard)
            carried = jnp.where(server.epoch > 0, previous, 0)
        else:
            answers = fed.ask(self.improve, cohort, when=when)
            heard = answers.sum(share)
        update = (1 - theta) * heard + theta * carried
        x = fed.project(server.x - gamma * update)
        self.learn(fed, update)

        done, sent = server.done + 1, server.sent + heard
        ends, empty = self.ends(done, to_end)
        if self.keeps:
            surrogates = fed.ask(self.tell, fed.everyone, server.epoch, when=ends)
            gathered = self.target(fed, surrogates)
            left_out = (1 - theta) * jnp.where(surrogates.any(), gathered - sent, 0)
            x = jnp.where(ends, fed.project(x - gamma * left_out), x)
            previous = jnp.where(ends, jnp.where(empty, 0, left_out), previous)
        else:
            previous = jnp.where(ends, 0, previous)
        fed.publish(Identity()(x - fed.w))
        epoch, sent, done = server.epoch + ends, jnp.where(ends, 0, sent), jnp.where(ends, 0, done)
        now = Server(x, previous, sent, epoch, done)
        info = {"cohort": cohort, "weights": share, "epoch_end": ends, "epochs": epoch}
        info |= self.weighting.info(fed.participation.weighting) | self.count(fed, cohort, when)
        return now, info | ({} if up is True else {"up": up})

    def target(self, fed: Federation, replies: Replies) -> Vector:
        """Return (1/M) Σ reply_m over all clients, or Σ p_m reply_m."""
        weights = self.weighting.objective_weights(fed.participation.weighting)
        return replies.sum() / fed.clients if weights is None else replies.sum(weights)

    def theta(self, round: Round) -> Scalar:
        """Return θ in this round."""
        if not isinstance(self.momentum, Theory):
            assert not isinstance(self.momentum, str)  # the converter allows no other word
            return self.momentum
        assert self.smoothness is not None
        p = self.epoch_end if self.epoch_length is None else 1 / self.epoch_length
        return at(self.step_size, round) * self.smoothness * p**2 / 2

    def ends(self, done: Int[Array, ""], key: PRNGKey) -> tuple[Bool[Array, ""], Bool[Array, ""]]:
        """Return whether the epoch ends after this iteration, and whether empty epochs follow."""
        if self.epoch_length is not None:
            return done >= self.epoch_length, jnp.asarray(False)
        ends, empty = jax.random.bernoulli(key, self.epoch_end, (2,))
        return ends, empty

    # On a client

    def init_client(self, w: Vector) -> Kept | None:
        zero = jnp.zeros_like(w)
        return Kept(zero, zero, jnp.int32(-1)) if self.keeps else None

    def work(self, client: Client, kept: Kept, epoch: Int[Array, ""]) -> tuple[Kept, None]:
        latest = self.pseudo_gradient(client)
        return Kept(latest, self.gathered(kept, epoch) + latest, epoch), None

    def send(self, client: Client, kept: Kept) -> tuple[Kept, Packet]:
        return kept, Identity()(kept.latest)

    def tell(self, client: Client, kept: Kept, epoch: Int[Array, ""]) -> tuple[Kept, Packet]:
        return kept, Identity()(self.gathered(kept, epoch))

    def gathered(self, kept: Kept, epoch: Int[Array, ""]) -> Vector:
        """Return the client's sum of gradients of this epoch: 0 if this is its first round."""
        return jnp.where(kept.epoch == epoch, kept.gathered, 0)

    def improve(self, client: Client, kept: None) -> tuple[None, Packet]:
        return None, Identity()(self.pseudo_gradient(client))

    def pseudo_gradient(self, client: Client) -> Vector:
        """Return ∇f_m(x) or the change of local steps; in PPBC+, divided by q_m."""
        total = self.descend(client, client.grad, Follows())
        if self.availability is None:
            return total
        return total / self.availability.rate(client.index, client.round)
