"""Numbers as elements of a ring, and what a secure sum needs and costs.

This needs no cryptography; `fedsolve.privacy.masking` has the protocol.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, UInt32

from fedsolve.errors import InvalidInput

SHARE_BYTES = 66  # one share of a secret
SECRET_BYTES = 32
SEALED_BYTES = 2 * SHARE_BYTES + 16  # two shares, encrypted and authenticated
LEAST_MEMBERS = 3  # in a sum of two, each knows the other's part

Words = UInt32[np.ndarray, " words"]


class Refused(InvalidInput):
    """A message of the protocol that cannot be right."""


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Fixed-point numbers in the ring of integers modulo 2^32.

    x is sent as round(x·scale), with the scale (2^31 − 1)/(members·bound) − 1/2 or less. So no sum
    of `members` numbers of size `bound` leaves the ring, and its error is at most
    members/(2·scale).

    Args:
        bound: The largest absolute value of a number.
        members: The most members of a sum.
        scale: The scale; None for the finest.
    """

    bound: float
    members: int
    scale: float | None = None

    def __post_init__(self):
        finest = (2**31 - 1 - self.members) / (self.members * self.bound)
        if self.scale is None:
            object.__setattr__(self, "scale", finest)
        elif not 0 < self.scale <= finest:
            raise Refused(
                f"A scale of {self.scale:g} could overflow: {self.members} numbers up to "
                f"{self.bound:g} allow at most {finest:g}."
            )

    def encode(self, values: Float[np.ndarray, " words"]) -> Words:
        """Return numbers as ring elements."""
        assert self.scale is not None
        if not np.all(np.abs(values) <= self.bound):  # NaN as well
            raise Refused(f"A number is larger than the bound {self.bound:g} of the encoding.")
        whole = np.rint(np.asarray(values, np.float64) * self.scale)
        return whole.astype(np.int64).astype(np.uint32)

    def decode(self, words: Words) -> Float[np.ndarray, " words"]:
        """Return the numbers that a sum of ring elements stands for."""
        assert self.scale is not None
        return words.view(np.int32).astype(np.float64) / self.scale


def check_threshold(threshold: int, members: int) -> None:
    """Raise if a threshold is not safe for that many members."""
    if members < LEAST_MEMBERS:
        raise Refused(
            f"A secure sum needs at least {LEAST_MEMBERS} members, and there are {members}: of "
            "two, each could tell the other's part."
        )
    if not members < 2 * threshold <= 2 * members:
        raise Refused(
            f"The threshold must be more than half of {members} members and at most all, got "
            f"{threshold}."
        )


def costs(members: int, words: int) -> tuple[int, int]:
    """Return the bytes that one member sends and receives in one use, all four phases together.

    Args:
        members: The number of members.
        words: The length of the vector.
    """
    up = 32 + members * SEALED_BYTES + 4 * words + members * SHARE_BYTES
    down = members * 32 + members * SEALED_BYTES + -(-members // 8)
    return up, down
