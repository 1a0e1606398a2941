"""A perceptron with one hidden layer."""

from __future__ import annotations

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Key

from fedsolve.models.base import Network, Shape
from fedsolve.models.layers import Images, Rows, dense, flat


class MLP(Network):
    """A perceptron: pixels, `hidden` rectified units, classes.

    Args:
        shape: Height, width and colours of an image.
        classes: The number of classes.
        hidden: The number of hidden units.
        key: Key of the initial parameters.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> network = fs.models.MLP((4, 4, 1), classes=3, hidden=5, key=jax.random.key(0))
        >>> network(jnp.zeros((2, 4, 4, 1))).shape
        (2, 3)
    """

    first: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, shape: Shape, classes: int = 10, hidden: int = 64, *, key: Key[Array, ""]):
        one, two = jax.random.split(key)
        self.first = eqx.nn.Linear(int(np.prod(shape)), hidden, key=one)
        self.head = eqx.nn.Linear(hidden, classes, key=two)

    def represent(self, images: Images) -> Rows:
        """Compute the hidden units of each image."""
        return jax.nn.relu(dense(self.first, flat(images)))
