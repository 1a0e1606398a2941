"""The base class of networks for images.

A network takes a batch of images (batch, height, width, colours) to a row of scores for each. It
computes in the type of the images: parameters keep their type and are cast where they are used, so
images in bfloat16 give mixed precision, with the means of normalisation always in at least float32.
`represent` is all but the last layer, `head`.

Weights of convolutions have the shape (out, in, height, width), and maps are flattened with
channels first, as in PyTorch, so that weights trained there fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
from jaxtyping import Array, Float

from fedsolve.models.layers import Images, Rows, dense

Shape = Sequence[int]  # height, width, colours


class Network(eqx.Module):
    """Base class of classifiers of images: `head` after `represent`.

    A subclass has a last layer `head` and defines `represent`.

    Args:
        head: The last layer, from a representation to the scores of the classes.
    """

    head: eqx.AbstractVar[eqx.nn.Linear]

    def represent(self, images: Images) -> Rows:
        """Compute the input of the last layer for each image.

        Args:
            images: A batch of images, of any floating-point type.

        Returns:
            One row of features for each image.
        """
        raise NotImplementedError

    def __call__(self, images: Images) -> Float[Array, "batch classes"]:
        """Compute the scores of the classes for each image.

        Args:
            images: A batch of images, of any floating-point type.

        Returns:
            One row of scores (logits) for each image, in the type of the images.
        """
        return dense(self.head, self.represent(images))
