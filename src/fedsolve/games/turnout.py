"""Games in which players are not always there.

In a round, player i is there with probability q_i and contributes N_i, else 0. It chooses N_i
before it knows who is there, and minimises the mean of its loss over all that can happen:

    E[c_i(N·s) − a_i(N·s)] + (λ/2) N_i²,   s_j = 1 with probability q_j, else 0.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_count
from fedsolve.games.parts import Numbers, Part, Players, numbers


class Turnout(Part):
    """The mean of a part over who is there.

    Args:
        part: The part of a game whose players are all there.
        there: One row for each case, one column for each player: whether it is there.
        weights: The probability of each case.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import fedsolve as fs
        >>> cost = fs.games.LinearCost([1.0, 1.0])
        >>> half = fs.games.Turnout(cost, np.array([[True, True], [False, True]]), [0.5, 0.5])
        >>> half(jnp.array([2.0, 4.0])).tolist()
        [1.0, 4.0]
    """

    part: Part
    there: Numbers
    weights: Numbers = eqx.field(converter=numbers("weights", 1))

    def alone(self, N: Players, y: Players) -> Players:
        def case(there: Shaped[Array, " m"]) -> Players:
            here = there.astype(N.dtype)
            return self.part.alone(N * here, y * here)

        each = jax.vmap(case)(jnp.asarray(self.there))
        return jnp.asarray(self.weights, N.dtype) @ each

    @property
    def affine(self) -> bool:
        return self.part.affine

    @property
    def players(self) -> int:
        return self.there.shape[1]


def turnouts(
    probability: Numbers, players: int, draws: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return who can be there, and with which probability: all cases, or as many as `draws`.

    Draws come in pairs of a case and its opposite quantiles, so that every player is there in about
    its share of them.
    """
    check_count("draws", draws)
    q = np.broadcast_to(np.asarray(probability, float), (players,))
    if not np.all((q > 0) & (q <= 1)):
        raise InvalidInput(
            f"probability must be above 0 and at most 1 for every player, got {probability}."
        )
    if 2**players <= draws:
        cases = (np.arange(2**players)[:, None] >> np.arange(players)) & 1 == 1
        weights = np.prod(np.where(cases, q, 1 - q), axis=1)
        return cases[weights > 0], weights[weights > 0]
    uniform = np.random.default_rng(seed).uniform(size=(-(-draws // 2), players))
    cases = np.concatenate([uniform, 1 - uniform]) < q
    return cases, np.full(len(cases), 1 / len(cases))
