"""Penalties of ADMM that follow the residuals.

Residual balancing (Boyd, Parikh, Chu, Peleato and Eckstein, "Distributed Optimization and
Statistical Learning via ADMM", section 3.4.1), on relative residuals (Wohlberg, "ADMM Penalty
Parameter Selection by Residual Balancing", 2017), which do not depend on the units of f and w.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar, check_count, check_positive, scalar
from fedsolve.types import Number, Round


class ResidualBalancing(eqx.Module):
    """Raise the penalties where the primal residual is larger, lower them where the dual one is.

    Args:
        ratio: The penalties change where one relative residual exceeds `ratio` times the other.
        factor: The factor by which they change.
        until: The number of rounds after which they stay as they are, so that convergence is that
            of fixed penalties.

    Raises:
        InvalidInput: If `ratio` or `factor` is not above 1, or `until` is not a positive integer.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> rule = fs.ResidualBalancing(ratio=10.0, factor=2.0)
        >>> one = jnp.float32(1.0)
        >>> float(rule.next(one, primal=20 * one, dual=one, round=0))
        2.0
    """

    ratio: Scalar = eqx.field(converter=scalar("ratio"), default=10.0)
    factor: Scalar = eqx.field(converter=scalar("factor"), default=2.0)
    until: int = eqx.field(default=100)

    def __check_init__(self):
        for name, value in (("ratio", self.ratio), ("factor", self.factor)):
            check_positive(name, value)
            if isinstance(value, float) and value <= 1:
                raise InvalidInput(f"{name} must be above 1, got {value:g}.")
        if isinstance(self.until, int | float):
            check_count("until", self.until)

    def next(
        self,
        scale: Float[Array, ""],
        primal: Number,
        dual: Number,
        round: Round | int,
    ) -> Float[Array, ""]:
        """Return what the first penalties are multiplied by in the next round.

        Args:
            scale: What they were multiplied by in this round.
            primal: The relative primal residual.
            dual: The relative dual residual.
            round: The round, counted from 0.
        """
        up, down = primal > self.ratio * dual, dual > self.ratio * primal
        change = jnp.where(up, self.factor, jnp.where(down, 1 / self.factor, 1.0))
        return scale * jnp.where(round < self.until, change, 1.0).astype(scale.dtype)
