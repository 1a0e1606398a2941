"""IncentFedAvg: federated averaging with clients that choose how much they contribute.

Paper: Maleki, Raghavan, Yousefian, "Incentive-Aware Federated Averaging with Performance Guarantees
under Strategic Participation" (2026), Algorithm 1.

    minimise Σ p_i(N*) f_i(x),   p_i(N) = N_i / Σ_j N_j,
    N* the Nash equilibrium of  min c_i(N) − a_i(N)  over  N_i in [N_i^min, N_i^max]

| here | paper | |
|---|---|---|
| `game` | a, c, N^min, N^max | `fs.Game` |
| `step_size` | γ | |
| `game_step_size` | γ̃ | at most μ_F/L_F² (`game.monotonicity().step_size`) |
| `local_steps` | H = T_{r+1} − T_r | a step draws the problem's `batch_size` samples |
| `start` | N̂_0 | by default the middle of the bounds |
| `contributions` | N̂_r | kept by the server |
| history `participation`, `weights` | N̂_{r+1}, p_{r+1} | after the round |

Models of round r are averaged with p_{r+1}, as lines 12 and 13 of Algorithm 1 say;
`theory/incentfedavg.py` tells what that means for the theorems, which are written with p_r.

With bounds that leave no choice, equal for all clients and to their numbers of samples, it is
FedAvg: to the bit if 1/m is exact (m a power of two), else up to rounding, since the compiler
treats known weights differently.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.algorithms.common import CompressedTraining
from fedsolve.compression.compressors import Compressor, Identity
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.federation.federation import Federation
from fedsolve.fields import (
    Numbers,
    Scalar,
    Schedule,
    at,
    check_kind,
    check_positive,
    optional,
    scalar,
    static,
)
from fedsolve.games import Game
from fedsolve.games.parts import numbers
from fedsolve.local_updates.optimizers import Optimizer, as_optimizer
from fedsolve.participation.strategic import (
    check_players,
    first_contributions,
    known_limits,
)
from fedsolve.participation.weighting import Uniform
from fedsolve.problem.client import Client
from fedsolve.problem.local_pass import Follows
from fedsolve.problem.problem import Problem
from fedsolve.types import Info, PRNGKey, PyTree, Vector

SUBSET = 2**31 - 1  # the subset's own key among those of the local steps


class Server(eqx.Module):
    """x̂_r, and N̂_r."""

    x: Vector
    contributions: Float[Array, " m"]


class IncentFedAvg(CompressedTraining):
    """Federated averaging with strategic participation (Algorithm 1).

    In every round, client i draws a random subset of ⌈N_i⌉ of its samples, takes local steps on it,
    and moves N_i along the negative gradient of its own loss in the game. The server weights the
    models by the new N. A client that does not answer keeps its N.

    Args:
        game: The game that the clients play.
        game_step_size: γ̃, the step of the clients' choices; at most μ_F/L_F².
        start: N̂_0, one number or one for each client; None for the middle of the bounds.
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink, error_feedback:
            Local training and compression; see `FedAvg`.
        participants, selection, availability: Which clients take part; see `Participating`.
        weighting: Not used: clients are weighted by what they contribute.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=3, size=3, smallest=5, largest=5)
        >>> game = fs.Game(
        ...     payoff=fs.games.RandomDiscovery([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]),
        ...     cost=fs.games.LinearCost([0.9, 0.4, 0.9]),
        ...     lower=1,
        ...     upper=5,
        ...     regularization=0.1,
        ... )
        >>> run = fs.solve(problem, fs.IncentFedAvg(game, 0.05, 0.1), rounds=3)
        >>> run.history["participation"].shape
        (3, 3)
    """

    game: Game
    step_size: Scalar | Schedule = eqx.field(converter=scalar("step_size"))
    game_step_size: Scalar = eqx.field(converter=scalar("game_step_size"))
    local_steps: int = static(1)
    local_optimizer: Optimizer | None = eqx.field(converter=as_optimizer, default=None)
    uplink: Compressor = Identity()
    downlink: Compressor = Identity()
    start: Numbers | None = eqx.field(converter=optional(numbers("start", 1)), default=None)

    def __check_init__(self):
        check_kind("game", self.game, Game)
        check_positive("game_step_size", self.game_step_size)
        if not isinstance(self.weighting, Uniform):
            raise InvalidInput(
                "IncentFedAvg weights clients by what they contribute; give it no weighting."
            )

    def check(self, problem: Problem) -> None:
        super().check(problem)
        check_players(self.game, self.start, problem)

    def limits(self) -> Info:
        return known_limits(self.game)

    def objective_weights(self, server: Server, participation: PyTree) -> Float[Array, " m"]:
        return server.contributions / jnp.sum(server.contributions)

    # On the server

    def init(self, w: Vector) -> Server:
        return Server(w, first_contributions(self.game, self.start, w.dtype))

    def round(self, fed: Federation, server: Server, key: PRNGKey) -> tuple[Server, Info]:
        to_sample, to_compress = jax.random.split(key)
        drawn = self.draw(fed, to_sample)
        before, cohort = server.contributions, drawn.cohort
        replies = fed.ask(self.improve, cohort, before, when=drawn.available)
        chosen = jnp.where(replies.arrived, replies.values["contribution"], before[cohort])
        N = before.at[cohort].set(chosen)
        update = replies.pick("update").mean(N[cohort])
        x = fed.project(server.x - at(self.step_size, fed.round) * update)
        fed.publish(self.downlink(x - fed.w, to_compress))
        return Server(x, N), drawn.info | {"participation": N, "weights": N / jnp.sum(N)}

    # On a client

    def improve(
        self, client: Client, residual: Vector | None, N: Float[Array, " m"]
    ) -> tuple[Vector | None, dict[str, Packet | Float[Array, ""]]]:
        count = jnp.ceil(N[client.index])
        subset = client.restricted(count, jax.random.fold_in(client.key, SUBSET))
        total = self.descend(subset, subset.grad, Follows())
        residual, packet = self.compress(client, residual, total)
        contribution = self.game.respond(client.index, N, self.game_step_size)
        return residual, {"contribution": contribution, "update": packet}
