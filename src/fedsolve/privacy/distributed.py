"""Differential privacy without a server to trust: noise that sites add before a secure sum.

Each of at least t sites in a sum adds N(0, (z C)²/t · I) to the sum over its clients, so that the
sum has noise of at least the deviation z C, and nobody has seen anything with less. Sums of a
round, their clips and what they cost are those of `fedsolve.privacy.private`; everyone, the server
included, may know who took part, so sampling counts for nothing.

Answers are rounded to the ring before noise, which is rounded, too. The first makes the sensitivity
C + √d/s for d numbers at the scale s, and the deviation grows with it.
"""

from __future__ import annotations

import math
import secrets

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.special import ndtri

from fedsolve.algorithms.base import Algorithm
from fedsolve.errors import InvalidInput
from fedsolve.federation.rules import EVALUATION
from fedsolve.fields import Scalar, static
from fedsolve.privacy.accounting import Ledger
from fedsolve.privacy.encoding import Words
from fedsolve.privacy.masking import stream
from fedsolve.privacy.private import Plan, Private
from fedsolve.privacy.secure import LARGEST, SecureSum
from fedsolve.problem.problem import Problem
from fedsolve.types import PyTree

TAIL = 17.0  # deviations of noise for which the ring has room: 12·√2, exceeded once in 10^32


class PrivateSum(SecureSum):
    """A secure sum to which those who are in it add noise.

    Args:
        deviations: By exchange, the standard deviation of the noise in each number of a sum.
    """

    deviations: dict[str, Scalar] = static(kw_only=True)

    def bound(self, name: str, size: int) -> Float[Array, ""]:
        return super().bound(name, size) + TAIL * self.deviations[name]

    def words(self, name: str, rows: PyTree, size: int, threshold: int) -> Words:
        scale = float(self.scale(name, size))
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(rows)]
        total = np.concatenate([leaf.sum(0).reshape(-1) for leaf in leaves])
        rounding = math.sqrt(total.size) / scale
        clip = float(self.clip_of(name))
        deviation = self.deviations[name] * (1 + rounding / clip) / math.sqrt(threshold)
        noise = deviation * scale * normal(total.size)
        return (np.rint(total * scale) + np.rint(noise)).astype(np.int64).astype(np.uint32)


def normal(size: int) -> Float[np.ndarray, " size"]:
    """Return standard normal numbers from the operating system's randomness."""
    words = stream(secrets.token_bytes(32), 2 * size).astype(np.uint64)
    whole = (words[:size] >> np.uint64(5)) * np.uint64(2**26) + (words[size:] >> np.uint64(6))
    return ndtri((whole.astype(np.float64) + 0.5) / 2.0**53)
