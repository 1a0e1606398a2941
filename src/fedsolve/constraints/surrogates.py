"""Smooth surrogates φ of the decision 1{z > 0}, for gradients of rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedsolve.errors import InvalidInput
from fedsolve.fields import check_positive

Surrogate = Callable[[Float[Array, "..."]], Float[Array, "..."]]
GRID = np.linspace(-20, 20, 161, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class Sigmoid:
    """The surrogate φ(z) = 1 / (1 + e^(−z/τ)), which tends to the decision as τ → 0.

    Args:
        temperature: τ.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> [round(float(fs.constraints.Sigmoid(0.1)(jnp.asarray(z))), 3) for z in (-1.0, 0.0, 1.0)]
        [0.0, 0.5, 1.0]
    """

    temperature: float = 1.0

    def __post_init__(self):
        check_positive("temperature", self.temperature)

    def __call__(self, z: Float[Array, "..."]) -> Float[Array, "..."]:
        """Compute φ."""
        return jax.nn.sigmoid(z / self.temperature)


@dataclasses.dataclass(frozen=True)
class Hinge:
    """The surrogate φ(z) = max(0, 1 + z/τ), convex and never below the decision.

    So where a constraint on rates holds with it, it holds for the rates. Gaps between rates have no
    such bound, and do not take it.

    Args:
        temperature: τ.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> [float(fs.constraints.Hinge()(jnp.asarray(z))) for z in (-2.0, 0.0, 1.0)]
        [0.0, 1.0, 2.0]
    """

    temperature: float = 1.0

    def __post_init__(self):
        check_positive("temperature", self.temperature)

    def __call__(self, z: Float[Array, "..."]) -> Float[Array, "..."]:
        """Compute φ."""
        return jnp.maximum(0, 1 + z / self.temperature)


def as_surrogate(value: object, temperature: float, symmetric: bool) -> Surrogate:
    """Return the surrogate that a user named or gave; raise if it disagrees with its rate.

    Args:
        value: `"sigmoid"`, `"hinge"` or a function of scores.
        temperature: τ of the named ones.
        symmetric: Whether φ(z) + φ(−z) must be 1, as for a difference of two rates.
    """
    named = {"sigmoid": Sigmoid, "hinge": Hinge}
    if isinstance(value, str):
        if value not in named:
            raise InvalidInput(
                f'surrogate must be "sigmoid", "hinge" or a function, got {value!r}.'
            )
        made: Surrogate = named[value](temperature)
    elif callable(value):
        made = value  # type: ignore[assignment]
    else:
        raise InvalidInput(f'surrogate must be "sigmoid", "hinge" or a function, got {value!r}.')
    _check_agrees(made, symmetric)
    return made


def _check_agrees(surrogate: Surrogate, symmetric: bool) -> None:
    """Raise if φ does not grow as the decision does."""
    found = np.asarray(surrogate(jnp.asarray(GRID)))
    if found.shape != GRID.shape or not np.isfinite(found).all():
        raise InvalidInput("The surrogate must return a finite number for each score.")
    steps = np.diff(found)
    if (steps < -1e-6).any():
        place = GRID[int(np.argmin(steps))]
        raise InvalidInput(
            f"The surrogate disagrees with its rate: it falls near a score of {place:g}, where the "
            "rate does not."
        )
    if found[0] > 0.5 or found[-1] < 0.5:
        raise InvalidInput(
            "The surrogate disagrees with its rate: it must be near 0 (at most 0.5) for a score of "
            f"{GRID[0]:g} and near 1 or above (at least 0.5) for {GRID[-1]:g}, got {found[0]:g} "
            f"and {found[-1]:g}."
        )
    if symmetric and np.abs(found + found[::-1] - 1).max() > 1e-3:
        raise InvalidInput(
            "A gap between rates needs a surrogate with φ(z) + φ(−z) = 1, such as the sigmoid: "
            "with another one the difference of two surrogates disagrees with that of the rates."
        )
