"""Compressors: maps from a vector to a packet that is smaller.

A compressor C maps a vector v ∈ ℝᵈ to a `Packet` (packets.py), whose arrays are what travels, and
`packet.dense()` is C(v). Either of two properties keeps federated methods convergent:

    contractive   E‖C(v) − v‖² ≤ (1 − q)‖v‖²                 `contraction(d)` is q ∈ (0, 1]
    unbiased      E C(v) = v  and  E‖C(v) − v‖² ≤ ω‖v‖²      `variance(d)` is ω ≥ 0

Biased contractive compressors need error feedback (error_feedback.py); unbiased ones do not.

    name          C(v)                                        sent             bound
    Identity      v                                           v                q = 1, ω = 0
    TopK          the K entries of largest magnitude          indices, values  q = K/d
    RandK         K uniform entries, times d/K                indices, values  ω = d/K − 1
                  (unscaled if unbiased=False; without indices if shared=True) q = K/d
    Float16, 8, 4 the nearest codewords to v / max|v|         max|v|, codes    q by worst case
    QSGD          ‖v‖ sign(v) ξ/s, ξ is s|v|/‖v‖ rounded      ‖v‖, codes       ω = min(d/s², √d/s)
    Compose       TopK or RandK, kept values compressed       indices, packet  q = q₁q₂

The bounds hold in float32 and float64, but not at the ends of their range (below 1e-30 or beyond
1e37 in float32), where XLA flushes subnormal numbers and reciprocals to zero.
QSGD and its bound are Alistarh et al. 2017, Lemma 3.1.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray, Shaped, UInt

from fedsolve.compression.packets import Common, Dense, Packet, Sparse
from fedsolve.errors import InvalidInput

Value = TypeVar("Value")
Kept = tuple[Int[Array, " kept"], Float[Array, " kept"]]


class Scaled(Packet):
    """A scale, and codes for v / scale that the compressor can decode."""

    scale: Float[Array, ""]
    codes: Shaped[Array, " n"]
    size: int = eqx.field(static=True)
    compressor: SmallFloat | QSGD = eqx.field(static=True)

    def dense(self) -> Float[Array, " d"]:
        # Codes of an odd number of entries may be padded to whole bytes.
        return self.scale * self.compressor.decode(self.codes, self.scale.dtype)[: self.size]


class Compressor(eqx.Module):
    """Base class of compressors: `compressor(v, key)` returns a packet.

    Subclasses implement `compress`, say whether they are `unbiased` and `contractive`, and give the
    constants of the bounds that hold.
    """

    unbiased = False
    contractive = False
    deterministic = False  # whether the bound holds every time, not only on average

    def __call__(self, v: Shaped[ArrayLike, "*shape"], key: PRNGKeyArray | None = None) -> Packet:
        """Compress a vector.

        Args:
            v: A non-empty vector of floating-point numbers.
            key: A random key; deterministic compressors need none.

        Returns:
            The packet, for which `packet.dense()` is C(v).
        """
        v, name = jnp.asarray(v), type(self).__name__
        if v.ndim != 1 or v.size == 0 or not jnp.issubdtype(v.dtype, jnp.floating):
            got = f"{v.dtype} of shape {v.shape}"
            raise InvalidInput(f"{name} compresses a non-empty 1-D float vector, got {got}.")
        if not isinstance(v, Tracer) and not np.isfinite(np.asarray(v)).all():
            raise InvalidInput(f"{name} compresses finite vectors, got one with NaN or infinity.")
        return self.compress(v, key)

    def bound(self, key: PRNGKeyArray) -> Compressor:
        """Return the compressor for one exchange, whose clients all have this key."""
        return self

    @abc.abstractmethod
    def compress(self, v: Float[Array, " d"], key: PRNGKeyArray | None) -> Packet:
        """Compress a vector that `__call__` has checked.

        Args:
            v: The vector.
            key: A random key, or None.

        Returns:
            The packet.
        """

    def contraction(self, size: int) -> float:
        """Return q with E‖C(v) − v‖² ≤ (1 − q)‖v‖² for every v of this size.

        Args:
            size: The size d of the vectors.
        """
        raise InvalidInput(f"{self} is not contractive and has no q; ask for its variance(size).")

    def variance(self, size: int) -> float:
        """Return ω with E‖C(v) − v‖² ≤ ω‖v‖², and E C(v) = v, for every v of this size.

        Args:
            size: The size d of the vectors.
        """
        raise InvalidInput(f"{self} is biased and has no ω; ask for its contraction(size).")


def _require(key: PRNGKeyArray | None, compressor: Compressor) -> PRNGKeyArray:
    """Return the key, or raise if there is none."""
    if key is None:
        name = type(compressor).__name__
        raise InvalidInput(f"{name} draws at random and needs a key: call compressor(v, key).")
    return key


def _parameter(valid: Callable[[Any], bool], sentence: str, **default: Any) -> Any:
    """Declare a static field whose converter raises with the sentence for an invalid value."""

    def convert(value: Value) -> Value:
        if not valid(value):
            raise InvalidInput(f"{sentence}, got {value!r}.")
        return value

    return eqx.field(static=True, converter=convert, **default)


def _number(kind: type, limit: int | float) -> Callable[[Any], bool]:
    """Make a predicate: whether a value is a number of this kind in (0, limit]."""
    return lambda x: isinstance(x, kind) and not isinstance(x, bool) and 0 < x <= limit


class Identity(Compressor):
    """Send the vector uncompressed, C(v) = v.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> fs.Identity()(jnp.asarray([1.0, 2.0])).nbytes
        8
    """

    unbiased = True
    contractive = True
    deterministic = True

    def compress(self, v: Float[Array, " d"], key: PRNGKeyArray | None) -> Dense:
        return Dense(v)

    def contraction(self, size: int) -> float:
        return 1.0

    def variance(self, size: int) -> float:
        return 0.0


class Sparsifier(Compressor):
    """Keep ⌈fraction · B⌉ of every B consecutive entries; B is d if no block is given."""

    fraction: eqx.AbstractVar[float]
    block = None

    @abc.abstractmethod
    def select(self, v: Float[Array, " d"], key: PRNGKeyArray | None) -> Kept:
        """Select the entries to keep: indices within blocks, and values."""

    def compress(self, v: Float[Array, " d"], key: PRNGKeyArray | None) -> Sparse:
        indices, values = self.select(v, key)
        block, share = self.layout(v.size)
        narrow = indices.astype(np.min_scalar_type(block - 1))
        return Sparse(narrow, Dense(values), v.size, block, share)

    def layout(self, size: int) -> tuple[int, int]:
        """Return the length of a block, and how many of its entries are kept."""
        block = size if self.block is None else min(int(self.block), size)
        # In floating point 0.07 · 100 is a little more than 7, and must keep 7.
        return block, max(1, math.ceil(self.fraction * block - 1e-9))

    def kept(self, size: int) -> int:
        """Return K, how many entries of a vector of this size are sent."""
        block, share = self.layout(size)
        return size // block * share + min(share, size % block)

    def contraction(self, size: int) -> float:
        if not self.contractive:
            return super().contraction(size)
        # A short last block keeps as many as the others, or all: at least their share.
        block, share = self.layout(size)
        return share / block


class TopK(Sparsifier):
    """Keep the K = ⌈fraction · d⌉ entries of largest magnitude.

    Args:
        fraction: The fraction of entries to keep, in (0, 1].
        block: Keep ⌈fraction · block⌉ of every block of this many entries; None for one block.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> fs.TopK(0.5)(jnp.asarray([3.0, -1.0, 0.5, -2.0])).dense().tolist()
        [3.0, 0.0, 0.0, -2.0]
    """

    fraction: float = _parameter(_number(Real, 1), "TopK needs a fraction in (0, 1]")
    block: int | None = _parameter(
        lambda block: block is None or _number(Integral, math.inf)(block),
        "TopK needs block to be a positive whole number or None",
        default=None,
    )
    contractive = True
    deterministic = True

    def select(self, v: Float[Array, " d"], key: PRNGKeyArray | None) -> Kept:
        block, share = self.layout(v.size)
        short = v.size % block
        whole, last = v[: v.size - short].reshape(-1, block), v[v.size - short :]
        _, columns = jax.lax.top_k(jnp.abs(whole), share)
        _, tail = jax.lax.top_k(jnp.abs(last), min(share, short))
        values = jnp.take_along_axis(whole, columns, axis=1)
        return jnp.append(columns, tail), jnp.append(values, last[tail])


class RandK(Sparsifier):
    """Keep K = ⌈fraction · d⌉ entries drawn uniformly without replacement.

    Args:
        fraction: The fraction of entries to keep, in (0, 1].
        unbiased: Whether entries are scaled by d/K, which makes the compressor unbiased; otherwise
            it is contractive.
        shared: Whether all clients keep the same entries, drawn anew in each round. Then no index
            is sent, and a secure sum can add up what is. For the uplink of algorithms with local
            steps.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> packet = fs.RandK(0.25)(jnp.ones(8), jax.random.key(0))
        >>> float(packet.dense().sum())
        8.0
    """

    fraction: float = _parameter(_number(Real, 1), "RandK needs a fraction in (0, 1]")
    unbiased: bool = eqx.field(default=True, static=True)
    shared: bool = eqx.field(default=False, static=True)

    def bound(self, key: PRNGKeyArray) -> Compressor:
        return SharedRandK(self, key) if self.shared else self

    @property
    def contractive(self) -> bool:
        # The factor d/K may make the error larger than v; it is 1 where all is kept.
        return not self.unbiased or self.fraction == 1

    def select(self, v: Float[Array, " d"], key: PRNGKeyArray | None) -> Kept:
        if self.shared:
            raise InvalidInput(
                "RandK(shared=True) draws by a key that all clients have: it is for the uplink of "
                "algorithms with local steps, such as FedAvg and FedSGM, and not for Compose."
            )
        kept = self.kept(v.size)
        indices = jax.random.choice(_require(key, self), v.size, (kept,), replace=False)
        return indices, v[indices] * (v.size / kept if self.unbiased else 1)

    def variance(self, size: int) -> float:
        return size / self.kept(size) - 1 if self.unbiased else super().variance(size)


class SharedRandK(Compressor):
    """`RandK` for one exchange, in which all clients keep the same entries.

    Args:
        rule: How many entries are kept, and how they are scaled.
        key: The key that all clients have.
    """

    rule: RandK
    key: PRNGKeyArray

    def compress(self, v: Float[Array, " d"], key: PRNGKeyArray | None) -> Common:
        kept, size = self.rule.kept(v.size), v.size
        packet = Common(v[:kept], jax.random.key_data(self.key), size)
        values = v[packet.positions()] * (size / kept if self.rule.unbiased else 1)
        return Common(values, packet.key, size)


def _normalized(v: Float[Array, " d"]) -> tuple[Float[Array, ""], Float[Array, " d"]]:
    """Return max|v| and v / max|v|, whose squares neither overflow nor vanish; zero stays zero."""
    peak = jnp.max(jnp.abs(v))
    # At least float32: a bfloat16 cannot tell 65504 from 65536, which is infinity to a float16.
    wide = v.astype(jnp.promote_types(v.dtype, jnp.float32))
    return peak, wide / jnp.where(peak > 0, peak, 1)


@functools.cache
def _codebook(format: np.dtype) -> Float[np.ndarray, " n"]:
    """Return the finite numbers c ≥ 0 of a floating-point format, in the order of their bits."""
    bits = np.arange(2 ** (jnp.finfo(format).bits - 1), dtype=f"uint{8 * format.itemsize}")
    numbers = bits.view(format).astype(np.float64)
    return numbers[np.isfinite(numbers)]


class SmallFloat(Compressor):
    """Round v / max|v| to the nearest number of a small format, whose largest stands for 1."""

    format: ClassVar[np.dtype]
    contractive = True
    deterministic = True

    @property
    def top(self) -> float:
        return float(_codebook(self.format)[-1])

    def compress(self, v: Float[Array, " d"], key: PRNGKeyArray | None) -> Scaled:
        peak, unit = _normalized(v)
        return Scaled(peak, self.encode(unit * self.top), v.size, self)

    def encode(self, x: Float[Array, " d"]) -> Shaped[Array, " n"]:
        """Return the codes of numbers in [−top, top]."""
        return x.astype(self.format)

    def decode(self, codes: Shaped[Array, " n"], dtype: DTypeLike) -> Float[Array, " padded"]:
        """Return the numbers in [−1, 1] that codes stand for."""
        return codes.astype(dtype) / self.top

    def contraction(self, size: int) -> float:
        """Return q, exact for the codebook c up to rounding.

        In units of max|v| / top, one entry is the top and has no error. The d − 1 others are x with
        errors e(x), and whatever the ratio λ, the x of largest e(x)² − λx² is the same for all.
        This is convex from a codeword to a midpoint of two, so x is a midpoint mᵢ, and its error
        half the gap, hᵢ: 1 − q = maxᵢ (d − 1)hᵢ² / (top² + (d − 1)mᵢ²).
        """
        lower, upper = _codebook(self.format)[:-1], _codebook(self.format)[1:]
        middle = (lower + upper) / 2
        # Scaling there and back rounds to float32 some four times, by 2⁻²⁴ each; allow twice that.
        error = (upper - lower) / 2 + 2.0**-21 * middle
        others = size - 1
        return 1 - float(np.max(others * error**2 / (self.top**2 + others * middle**2)))


class Float16(SmallFloat):
    """Send two bytes per entry (IEEE half precision).

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> fs.Float16()(jnp.ones(100)).nbytes
        204
    """

    format = np.dtype(jnp.float16)


class Float8(SmallFloat):
    """Send one byte per entry (e4m3fn).

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> fs.Float8()(jnp.ones(100)).nbytes
        104
    """

    format = np.dtype(jnp.float8_e4m3fn)


class Float4(SmallFloat):
    """Send half a byte per entry (e2m1): ± 0, ½, 1, 1½, 2, 3, 4, 6.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> fs.Float4()(jnp.ones(100)).nbytes
        54
    """

    # JAX keeps a float4 in a whole byte, so two codes, a sign and three bits each, are packed here.

    format = np.dtype(jnp.float4_e2m1fn)

    def encode(self, x: Float[Array, " d"]) -> UInt[Array, " n"]:
        codebook = _codebook(self.format)
        middle = jnp.asarray((codebook[:-1] + codebook[1:]) / 2, x.dtype)
        nearest = jnp.searchsorted(middle, jnp.abs(x), method="compare_all")
        codes = jnp.where(x < 0, nearest + 8, nearest).astype(jnp.uint8)
        low, high = jnp.pad(codes, (0, x.size % 2)).reshape(-1, 2).T
        return low | high << 4

    def decode(self, codes: UInt[Array, " n"], dtype: DTypeLike) -> Float[Array, " padded"]:
        codebook = _codebook(self.format)
        signed = jnp.asarray(np.concatenate([codebook, -codebook]) / self.top, dtype)
        return signed[jnp.stack([codes & 15, codes >> 4], axis=1).ravel()]


class QSGD(Compressor):
    """Round s|v|/‖v‖ up or down at random, so that the mean is exact.

    Args:
        levels: The number of levels s, at most 32767; one byte per entry up to 127, else two.

    Example:
        >>> import fedsolve as fs
        >>> import jax
        >>> import jax.numpy as jnp
        >>> fs.QSGD(127)(jnp.ones(100), jax.random.key(0)).nbytes
        104
    """

    levels: int = _parameter(
        _number(Integral, 32767), "QSGD needs a whole number of levels from 1 to 32767"
    )
    unbiased = True

    def compress(self, v: Float[Array, " d"], key: PRNGKeyArray | None) -> Scaled:
        peak, unit = _normalized(v)
        length = jnp.linalg.norm(unit)  # at least 1, unless v = 0
        # A device may divide inexactly, and a level beyond the last has no code.
        level = jnp.minimum(jnp.abs(unit) / jnp.maximum(length, 1), 1) * self.levels
        below = jnp.floor(level)
        above = jax.random.bernoulli(_require(key, self), level - below)
        codes = jnp.sign(v) * (below + above)
        narrow = jnp.int8 if self.levels <= 127 else jnp.int16
        return Scaled((peak * length).astype(v.dtype), codes.astype(narrow), v.size, self)

    def decode(self, codes: Int[Array, " n"], dtype: DTypeLike) -> Float[Array, " n"]:
        """Return the numbers in [−1, 1] that codes stand for."""
        return codes.astype(dtype) / self.levels

    def variance(self, size: int) -> float:
        return min(size / self.levels**2, math.sqrt(size) / self.levels)


class Compose(Compressor):
    """Sparsify with one compressor, then compress the kept values with another.

    Args:
        first: The sparsifier, `TopK` or `RandK`.
        second: The compressor of the kept values.

    Example:
        >>> import fedsolve as fs
        >>> import jax.numpy as jnp
        >>> compressor = fs.Compose(fs.TopK(0.1), fs.Float8())
        >>> compressor(jnp.ones(100)).nbytes
        24
    """

    first: Sparsifier = _parameter(
        lambda first: isinstance(first, Sparsifier), "Compose needs TopK or RandK to come first"
    )
    second: Compressor = _parameter(
        lambda second: isinstance(second, Compressor), "Compose needs a compressor to come second"
    )

    def __check_init__(self):
        if not (self.unbiased or self.contractive):
            need = "Compose needs two contractive compressors or two unbiased ones"
            raise InvalidInput(f"{need}, got {self.first} and {self.second}.")

    @property
    def unbiased(self) -> bool:
        return self.first.unbiased and self.second.unbiased

    @property
    def contractive(self) -> bool:
        return self.first.contractive and self.second.contractive

    @property
    def deterministic(self) -> bool:
        return self.first.deterministic and self.second.deterministic

    def compress(self, v: Float[Array, " d"], key: PRNGKeyArray | None) -> Sparse:
        first_key, second_key = (None, None) if key is None else jax.random.split(key)
        kept = self.first.compress(v, first_key)
        return dataclasses.replace(kept, values=self.second(kept.values.dense(), second_key))

    def contraction(self, size: int) -> float:
        # v = kept + dropped, and the supports are disjoint, so the errors add up:
        # ‖C(v) − v‖² = ‖C₂(kept) − kept‖² + ‖dropped‖² ≤ ‖v‖² − q₂‖kept‖², and E‖kept‖² ≥ q₁‖v‖².
        return self.first.contraction(size) * self.second.contraction(self.first.kept(size))

    def variance(self, size: int) -> float:
        # Second moments multiply: E‖C(v)‖² ≤ (1 + ω₂) E‖C₁(v)‖² ≤ (1 + ω₂)(1 + ω₁)‖v‖².
        inner = self.second.variance(self.first.kept(size))
        return (1 + self.first.variance(size)) * (1 + inner) - 1
