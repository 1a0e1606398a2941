"""Rules that stand between the clients' answers and the algorithm.

A rule gives the algorithm sums and means of the answers and nothing else: with noise for privacy,
computed under a mask, or robust to a few wrong answers. An algorithm that looks at single answers
is refused when its round is traced, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NamedTuple, NoReturn

import equinox as eqx
from jaxtyping import Array, Bool, Float, Int

from fedsolve.errors import InvalidInput
from fedsolve.federation.replies import Replies
from fedsolve.fields import Scalar
from fedsolve.types import Flags, Info, PyTree, Reply

EVALUATION = "evaluation"  # the name of the exchange in which clients are evaluated
Weights = Float[Array, " m"] | None
Total = Callable[[Weights, bool], PyTree]  # weights, mean or sum -> a tree like one reply
Draw = Callable[[tuple[int, ...]], Float[Array, "..."]]  # a shape -> standard normal numbers


class Context(NamedTuple):
    """What a rule may use beside the answers.

    Args:
        name: The name of the exchange.
        draw: Draws standard normal numbers that no client and no algorithm draws.
        release: Called with the name of the exchange for every sum that is computed.
    """

    name: str
    draw: Draw
    release: Callable[[str], None]


class Rule(eqx.Module):
    """Base class of what `solve(..., privacy=..., aggregation=...)` puts in a round."""

    drops_broken: ClassVar[bool] = False  # whether it leaves out answers that are not finite
    hides: ClassVar[bool] = False  # whether nobody may see what a client sends beside its answer

    def clip_of(self, name: str) -> Scalar | None:
        """Return the largest norm of a reply in the exchange of that name; None for any norm."""
        return None

    def receive(self, replies: Replies, context: Context) -> Replies:
        """Return what the algorithm gets in place of the answers."""
        raise NotImplementedError

    def arriving(self, arrived: Flags) -> Flags:
        """Return which answers count as arrived, of those that arrive."""
        return arrived

    def cost(self, replies: Reply, size: int) -> tuple[int, int] | None:
        """Return the bytes that each client sends, and receives beyond the message.

        Args:
            replies: The answers, stacked on a leading axis.
            size: The number of clients that are asked.

        Returns:
            The bytes; None where answers are sent as they are.
        """
        return None

    def covers_evaluation(self) -> bool:
        """Whether objective and constraint over all clients go through the rule as well."""
        return False

    def published(self, info: Info) -> Info:
        """Return the part of a round's entry that may be in the history."""
        return info


class Summed(eqx.Module):
    """The sum of a cohort's answers, which nobody has one by one.

    Args:
        words: The sum as ring elements, in the form of one answer with a leading axis of 1.
        like: The shapes of one answer, with its packets.
        key: The data of the key that all of them share.
    """

    words: PyTree
    like: PyTree = eqx.field(static=True, default=None)
    key: Array | None = None


class Sealed:
    """Stands for answers that nobody may look at; any use raises."""

    def __init__(self, why: str):
        object.__setattr__(self, "_why", why)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise InvalidInput(object.__getattribute__(self, "_why"))

    __getattr__ = __getitem__ = __iter__ = __len__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pow__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _refuse
    )


class SumsOnly(Replies):
    """Answers of which the algorithm gets sums and means only.

    Args:
        total: Computes the sum of all answers, or their mean.
        path: The part of the answers.
        size: The number of answers that there count as arrived, where it must not be told.
    """

    total: Total = eqx.field(static=True, kw_only=True)
    path: tuple[str | int, ...] = eqx.field(static=True, default=(), kw_only=True)
    size: float | None = eqx.field(static=True, default=None, kw_only=True)

    @property
    def count(self) -> Int[Array, ""] | int | float:
        return super().count if self.size is None else self.size

    def any(self) -> Bool[Array, ""] | bool:
        return super().any() if self.size is None else True

    def pick(self, part: str | int) -> Replies:
        path = (*self.path, part)
        return SumsOnly(
            self.values, self.arrived, self.on_sum, total=self.total, path=path, size=self.size
        )

    def sum(self, weights: Weights = None) -> PyTree:
        return self._part(weights, False)

    def mean(self, weights: Weights = None) -> PyTree:
        return self._part(weights, True)

    def _part(self, weights: Weights, mean: bool) -> PyTree:
        if self.on_sum is not None and weights is not None:
            self.on_sum(weights)
        found = self.total(weights, mean)
        for part in self.path:
            found = found[part]
        return found


def sums_only(replies: Replies, why: str, total: Total, size: float | None = None) -> SumsOnly:
    """Return answers of which only sums and means can be had.

    Args:
        replies: The answers.
        why: The sentence with which any other use is refused.
        total: Computes a sum or a mean.
        size: The number of answers that count as arrived, where it must not be told.
    """
    return SumsOnly(Sealed(why), replies.arrived, replies.on_sum, total=total, size=size)
