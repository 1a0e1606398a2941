"""Safe-EF: switching subgradients with error feedback, one step a round, everyone taking part.

Paper: Islamov, As and Fatkhullin, "Safe-EF: Error Feedback for Non-smooth Constrained Optimization"
(ICML 2025), Algorithm 1. FedSGM's paper names it as the work that it extends by local steps,
partial participation and soft switching.

    h_j = ∇f_j(w_t) if g(w_t) ≤ c, else ∇g_j(w_t),
    v_j = C(e_j + h_j),   e_j ← e_j + h_j − v_j,
    x_{t+1} = Π_X[x_t − γ (1/n) Σ v_j],   w_{t+1} = w_t + C_0(x_{t+1} − w_t).

| here | paper | |
|---|---|---|
| `step_size` | γ | |
| `tolerance` | c | |
| `uplink`, `downlink` | C, C_0 | both contractive |
| `run.average` | | the mean of w_t over rounds with g(w_t) ≤ c |

It is `FedSGM` with E = 1, hard switching and m = n, to the bit.
"""

from __future__ import annotations

from fedsolve.algorithms.fedsgm import FedSGM
from fedsolve.algorithms.switching import Hard
from fedsolve.errors import InvalidInput
from fedsolve.participation.weighting import Uniform


class SafeEF(FedSGM):
    """Safe-EF: FedSGM with one step, hard switching and every client in every round.

    Args:
        step_size: γ, a number or a schedule.
        tolerance: c, points with g(w) ≤ c are treated as feasible.
        uplink: The compressor of the clients, which must be contractive (EF14).
        downlink: The compressor of the server, which must be contractive (EF21-P).
        switching, local_steps, local_epochs, local_optimizer, error_feedback: As FedSGM's defaults;
            anything else raises, since it is FedSGM and not Safe-EF.
        among, participants, weighting, selection, availability: Likewise.

    Raises:
        InvalidInput: If an argument makes it another method.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> problem = fs.Problem(
        ...     objective=lambda w, data: 0.5 * jnp.sum((w - data["target"]) ** 2),
        ...     clients={"target": jnp.eye(3)},
        ...     params=jnp.zeros(3),
        ...     constraint=lambda w, data: jnp.sum(w) - 0.5,
        ... )
        >>> top = fs.TopK(0.4)
        >>> algorithm = fs.SafeEF(0.1, tolerance=0.01, uplink=top, downlink=top)
        >>> run = fs.solve(problem, algorithm, rounds=3)
        >>> run.history["switch"].shape
        (3,)
    """

    def __check_init__(self):
        others = {
            "local_steps": self.local_steps != 1,
            "local_epochs": self.local_epochs is not None,
            "local_optimizer": self.local_optimizer is not None,
            "switching": not isinstance(self.switching, Hard),
            "error_feedback": not self.error_feedback,
            "participants": self.participants is not None,
            "weighting": not isinstance(self.weighting, Uniform),
            "selection": self.selection is not None,
            "availability": self.availability is not None,
        }
        for name, given in others.items():
            if given:
                raise InvalidInput(f"Safe-EF has no other {name}; FedSGM is Safe-EF with it.")
        if not self.uplink.contractive:
            raise InvalidInput(
                "The uplink must be contractive, as error feedback needs it: "
                f"{type(self.uplink).__name__} is unbiased (RandK(unbiased=False) would do)."
            )
