"""FedVARP: variance reduction over the choice of participants.

Paper: Jhunjhunwala et al., "FedVARP: Tackling the Variance Due to Partial Client Participation in
Federated Learning" (UAI 2022), Algorithm 1.

| here | paper | |
|---|---|---|
| `step_size` | η_c, with η̃_s = η_s η_c τ the server's | with a `local_optimizer`, the server's |
| `local_steps` | τ | |
| `kept` | y_i | client i's latest update; zero at first |
| `mean` | (1/N) Σ_j y_j | kept by the server, before the answers of the round |

The server moves along

    v = (1/|S|) Σ_{i in S} (Δ_i − y_i) + (1/N) Σ_j y_j,    then y_i ← Δ_i for i in S,

which is unbiased where participants are drawn uniformly. In the paper the server keeps all y_i, and
clients keep nothing. The numbers are the same where client i keeps y_i and sends Δ_i − y_i, as
here: then the server keeps one vector. `MIFA` has 1/N for both sums: SAG, where this is SAGA.
"""

from __future__ import annotations

from fedsolve.algorithms.mifa import MIFA
from fedsolve.algorithms.participating import Drawn
from fedsolve.federation.replies import Replies
from fedsolve.types import Vector


class FedVARP(MIFA):
    """Federated averaging with variance reduction over the choice of participants.

    A compressed uplink sends C(Δ_i − y_i), where y_i is what the server has of client i.

    Args:
        step_size, local_steps, local_epochs, local_optimizer, uplink, downlink, server_optimizer:
            Local training, compression and the server's step; see `FedAvg`.
        participants, weighting, selection, availability: Which clients take part; see
            `Participating`. Weights are those of the first sum; the second one is a plain mean.

    Example:
        >>> import fedsolve as fs
        >>> problem = fs.problems.linear_regression(clients=4, size=3, smallest=5, largest=5)
        >>> run = fs.solve(problem, fs.FedVARP(0.02, local_steps=2, participants=2), rounds=9)
        >>> bool(run.history["objective"][-1] < run.history["objective"][0])
        True
    """

    takes_unbiased = True

    def estimate(self, before: Vector, mean: Vector, answers: Replies, drawn: Drawn) -> Vector:
        return drawn.mean(answers) + before
