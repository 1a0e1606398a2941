"""PPBC and PPBC+: partial participation with bias correction, under any selection of clients.

Paper: "Partial participation with bias correction" (under review, ICLR 2026), Algorithm 1 (PPBC)
and Algorithm 2 (PPBC+, clients that come and go).

    minimise f(x) = (1/M) Σ f_m(x)

or, with weights that are the problem's own (`Strategic`), Σ p_m f_m(x): p_m is then in 1/M's place.

| here | paper | |
|---|---|---|
| `step_size` | γ | |
| `momentum` | θ | `"theory"`: γLp²/2, Theorem 3.2 |
| `epoch_end` | p | iterations of an epoch: H ~ Geom(p), P(H = j) = p(1 − p)^j, j ≥ 0 |
| `weighting`, `cap` | π, α | weights on {π ≥ 0, Σπ = 1, π_m ≤ α/M} |
| `select_epoch`, `select_round` | R̂, R̃ | what they leave is projected onto the capped set, too |
| `availability` | η_m, q_m | with it, this is PPBC+ |
| `previous` | g^{k−1,H} | the last epoch's surrogates, added up |
| `gathered` | Σ_h (1/M) ∇f_m | kept by client m, over this epoch |
| `sent` | Σ_h Σ_m π̃_m ∇f_m | what the server got in this epoch |

A round is one iteration of an epoch: every client that is up computes, those selected send. In the
paper client m keeps g_m = (1 − θ) Σ_h (1/M − π̃_m)∇f_m. Their sum is all that the server uses, and
it knows the part with π̃ itself, so clients need not be told π̃: they keep and send `gathered`.

A round that ends an epoch (`epoch_end` in the history; `epochs` counts them) also makes the next
one's first move, line 7; its parameters are the next epoch's start x^{k,0}, where the theorems
hold: measure there.
Empty epochs (H = 0) need no round of their own: all they do is to forget `previous`.

In PPBC+ a gradient counts η_m/q_m, which keeps the expectation of line 17 only if π̃ does not depend
on this round's η. So weights are asked for when an epoch begins, of all clients: all of them were
reached just before, for their surrogates. R̃ of Algorithm 2 is the outage itself; a `select_round`
comes on top, and draws by what was known at the epoch's start, whoever is up.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from fedsolve.algorithms.common import LocalTraining
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
    check_positive,
    optional,
    scalar,
    static,
)
from fedsolve.local_updates.optimizers import Optimizer, as_optimizer
from fedsolve.problem.client import Client

Vector = Float[Array, " d"]


class Theory(eqx.Module):
    """θ as Theorem 3.2 allows it."""


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


def _momentum(value: Any) -> Any:
    return Theory() if value == "theory" else scalar("momentum")(value)


class PPBC(LocalTraining, SelectingTwice):
    """Partial participation with bias correction: whoever is selected, however unfairly, the
    clients keep what the selection left out, and the server makes up for it once an epoch.

    - Clients are selected once an epoch and again in every round, as `SelectingTwice` has it.
    - `smoothness` is L, for `momentum="theory"`. A fixed θ does not vanish with γ, and neither does
      the error that it leaves; 0 is safe.
    - With `local_steps` or a `local_optimizer` a client's change takes the gradient's place.
    - `availability` makes it PPBC+: gradients count 1/q_m while a client is up.
    - `correction=False` leaves out all that PPBC adds: FedAvg with the same strategy.
    - As in the authors' code: `epoch_length` (a fixed number of iterations, in place of
      `epoch_end`), `counting="uniform"` (whoever is selected counts 1/M) and
      `surrogate="current"`: θ multiplies what this epoch left out so far, from the second epoch on,
      and nothing is made up for at its end. For that the server hears all clients in every round:
      it is no partial participation.
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

    def __check_init__(self):
        check_positive("epoch_end", self.epoch_end)
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
            check_positive("momentum", self.momentum, zero=True)
            self._warn()

    def _warn(self) -> None:
        known = 0.0 if self.smoothness is None else self.smoothness
        numbers: tuple[Any, ...] = (self.momentum, self.epoch_end, self.step_size, known)
        if self.epoch_length is not None or not all(isinstance(x, float) for x in numbers):
            return
        theta, p, gamma, smoothness = numbers
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

    @property
    def keeps(self) -> bool:
        """Whether clients keep what the selection leaves out of their gradients."""
        return self.correction and self.surrogate == "previous"

    # On the server

    def init(self, w: Vector) -> Server:
        zero = jnp.zeros_like(w)
        return Server(w, zero, zero, jnp.int32(0), jnp.int32(0))

    def round(
        self, fed: Federation, server: Server, key: Key[Array, ""]
    ) -> tuple[Server, dict[str, Any]]:
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
        elif self.correction:  # `previous` is this epoch's own, and the server adds it up
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
        info |= self.weighting.info(fed.participation.weighting)
        return now, info | ({} if up is True else {"up": up})

    def target(self, fed: Federation, replies: Replies) -> Vector:
        """(1/M) Σ of what all clients said, or Σ p_m."""
        weights = self.weighting.objective_weights(fed.participation.weighting)
        return replies.sum() / fed.clients if weights is None else replies.sum(weights)

    def theta(self, round: Any) -> Any:
        """θ in this round."""
        if not isinstance(self.momentum, Theory):
            return self.momentum
        assert self.smoothness is not None
        p = self.epoch_end if self.epoch_length is None else 1 / self.epoch_length
        return at(self.step_size, round) * self.smoothness * p**2 / 2

    def ends(self, done: Int[Array, ""], key: Key[Array, ""]) -> tuple[Any, Any]:
        """Whether the epoch ends after this iteration, and whether empty epochs follow it."""
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
        """What a client gathered in this epoch; one that was down at first begins late."""
        return jnp.where(kept.epoch == epoch, kept.gathered, 0)

    def improve(self, client: Client, kept: None) -> tuple[None, Packet]:
        return None, Identity()(self.pseudo_gradient(client))

    def pseudo_gradient(self, client: Client) -> Vector:
        """∇f_m(x), or what stands for it, times 1/q_m for a client that is not always up."""
        total = self.descend(client, client.grad)
        if self.availability is None:
            return total
        return total / self.availability.rate(client.index, client.round)
