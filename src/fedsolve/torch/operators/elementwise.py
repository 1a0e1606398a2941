"""Operators that work element by element.

Where PyTorch and JAX differ in the derivative at a kink (`clamp`, `hardtanh`) or far out
(`softplus`), the functions here follow PyTorch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from fedsolve.torch.operators.table import Mask, Maybe, Number, Operand, Tensor, operator


def _register() -> None:
    """Register the operators that JAX has under the same rules."""
    same = {
        "abs": jnp.abs,
        "acos": jnp.arccos,
        "acosh": jnp.arccosh,
        "asin": jnp.arcsin,
        "asinh": jnp.arcsinh,
        "atan": jnp.arctan,
        "atan2": jnp.arctan2,
        "atanh": jnp.arctanh,
        "bitwise_and": jnp.bitwise_and,
        "bitwise_not": jnp.bitwise_not,
        "bitwise_or": jnp.bitwise_or,
        "bitwise_xor": jnp.bitwise_xor,
        "ceil": jnp.ceil,
        "cos": jnp.cos,
        "cosh": jnp.cosh,
        "digamma": special.digamma,
        "eq": jnp.equal,
        "erf": special.erf,
        "erfc": special.erfc,
        "erfinv": special.erfinv,
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "floor": jnp.floor,
        "fmod": jnp.fmod,
        "ge": jnp.greater_equal,
        "gt": jnp.greater,
        "isfinite": jnp.isfinite,
        "isinf": jnp.isinf,
        "isnan": jnp.isnan,
        "le": jnp.less_equal,
        "lgamma": special.gammaln,
        "log": jnp.log,
        "log10": jnp.log10,
        "log1p": jnp.log1p,
        "log2": jnp.log2,
        "logaddexp": jnp.logaddexp,
        "logical_and": jnp.logical_and,
        "logical_not": jnp.logical_not,
        "logical_or": jnp.logical_or,
        "logical_xor": jnp.logical_xor,
        "lt": jnp.less,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "mul": jnp.multiply,
        "ne": jnp.not_equal,
        "neg": jnp.negative,
        "reciprocal": jnp.reciprocal,
        "relu": jax.nn.relu,
        "remainder": jnp.remainder,
        "rsqrt": lax.rsqrt,
        "sigmoid": jax.nn.sigmoid,
        "sign": jnp.sign,
        "sgn": jnp.sign,
        "silu": jax.nn.silu,
        "sin": jnp.sin,
        "sinh": jnp.sinh,
        "sqrt": jnp.sqrt,
        "tan": jnp.tan,
        "tanh": jnp.tanh,
        "trunc": jnp.trunc,
    }
    floats = {"rsqrt", "sigmoid", "silu", "erf", "erfc", "erfinv", "digamma", "lgamma"}
    for name, function in same.items():
        if name in floats:
            operator(f"aten.{name}", layout="any")(_of_floats(function))
        else:
            operator(f"aten.{name}", layout="any")(function)


def _of_floats(function):
    """Let a function of floating-point numbers take others."""
    return lambda x: function(x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(float))


_register()


@operator("aten.add", layout="any")
def add(x: Operand, y: Operand, alpha: Number = 1) -> Tensor:
    """Compute x + alpha y."""
    return jnp.add(x, y if alpha == 1 else jnp.multiply(y, alpha))


@operator("aten.sub", layout="any")
def sub(x: Operand, y: Operand, alpha: Number = 1) -> Tensor:
    """Compute x - alpha y."""
    return jnp.subtract(x, y if alpha == 1 else jnp.multiply(y, alpha))


@operator("aten.rsub", layout="any")
def rsub(x: Operand, y: Operand, alpha: Number = 1) -> Tensor:
    """Compute y - alpha x."""
    return sub(y, x, alpha)


@operator("aten.div", layout="any")
def div(x: Operand, y: Operand, rounding_mode: str | None = None) -> Tensor:
    """Divide."""
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    return jnp.trunc(jnp.true_divide(x, y))


@operator("aten.floor_divide", layout="any")
def floor_divide(x: Operand, y: Operand) -> Tensor:
    """Divide and round down."""
    return jnp.floor_divide(x, y)


@operator("aten.addcmul", layout="any")
def addcmul(x: Tensor, y: Tensor, z: Tensor, value: Number = 1) -> Tensor:
    """Compute x + value y z."""
    return x + value * y * z


@operator("aten.addcdiv", layout="any")
def addcdiv(x: Tensor, y: Tensor, z: Tensor, value: Number = 1) -> Tensor:
    """Compute x + value y / z."""
    return x + value * y / z


@operator("aten.lerp", layout="any")
def lerp(x: Tensor, y: Tensor, weight: Operand) -> Tensor:
    """Compute the point between x and y."""
    return x + weight * (y - x)


@operator("aten.xlogy", layout="any")
def xlogy(x: Operand, y: Operand) -> Tensor:
    """Compute x log y, 0 where x is 0."""
    return special.xlogy(x, y)


@operator("aten.pow", layout="any")
def power(x: Operand, exponent: Operand) -> Tensor:
    """Compute a power; one with a whole exponent has derivatives at 0, too."""
    if not isinstance(exponent, jax.Array) and float(exponent).is_integer():
        if abs(exponent) > 64 or not isinstance(x, jax.Array):
            return jnp.power(x, exponent)
        return lax.integer_pow(x, int(exponent))
    return jnp.power(x, exponent)


@operator("aten.round", layout="any")
def rounded(x: Tensor, decimals: int = 0) -> Tensor:
    """Round to the nearest, halves to even."""
    return jnp.round(x, decimals)


@operator("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", layout="any")
@operator("aten.where.Scalar", layout="any")
def where(condition: Mask, x: Operand, y: Operand) -> Tensor:
    """Choose."""
    return jnp.where(condition, x, y)


@operator("aten.masked_fill", layout="any")
def masked_fill(x: Tensor, mask: Mask, value: Operand) -> Tensor:
    """Replace by a value."""
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@operator("aten.clamp", layout="any")
def clamp(x: Tensor, min: Operand | None = None, max: Operand | None = None) -> Tensor:
    """Limit to an interval; the derivative is 1 at its ends, too."""
    if min is not None:
        x = jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


@operator("aten.clamp_min", layout="any")
def clamp_min(x: Tensor, min: Operand) -> Tensor:
    """Limit from below."""
    return clamp(x, min)


@operator("aten.clamp_max", layout="any")
def clamp_max(x: Tensor, max: Operand) -> Tensor:
    """Limit from above."""
    return clamp(x, None, max)


@operator("aten.hardtanh", layout="any")
def hardtanh(x: Tensor, min_val: Number = -1, max_val: Number = 1) -> Tensor:
    """Limit to an interval; the derivative is 0 at its ends."""
    return jnp.where(x <= min_val, min_val, jnp.where(x >= max_val, max_val, x))


@operator("aten.relu6", layout="any")
def relu6(x: Tensor) -> Tensor:
    """Limit to [0, 6]."""
    return hardtanh(x, 0, 6)


@operator("aten.hardsigmoid", layout="any")
def hardsigmoid(x: Tensor) -> Tensor:
    """Compute relu6(x + 3) / 6."""
    return hardtanh(x + 3, 0, 6) / 6


@operator("aten.hardswish", layout="any")
def hardswish(x: Tensor) -> Tensor:
    """Compute x relu6(x + 3) / 6."""
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, x * (x + 3) / 6))


@operator("aten.leaky_relu", layout="any")
def leaky_relu(x: Tensor, negative_slope: Number = 0.01) -> Tensor:
    """Return x where it is positive, or else a part of it."""
    return jnp.where(x > 0, x, negative_slope * x)


@operator("aten.prelu", "aten._prelu_kernel", layout="first")
def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """Return x where it is positive, or else a part of it that is learned for each channel."""
    if weight.ndim == 1 and weight.size > 1:
        weight = weight.reshape(-1, *[1] * (x.ndim - 2))
    return jnp.where(x > 0, x, weight * x)


@operator("aten.elu", layout="any")
def elu(x: Tensor, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Tensor:
    """Return scale x where it is positive, or else scale alpha (exp(input_scale x) - 1)."""
    below = jnp.where(x > 0, 0, x)
    return jnp.where(x > 0, scale * x, scale * alpha * jnp.expm1(input_scale * below))


@operator("aten.celu", layout="any")
def celu(x: Tensor, alpha: Number = 1) -> Tensor:
    """Return x where it is positive, or else alpha (exp(x / alpha) - 1)."""
    return elu(x, alpha, 1, 1 / alpha)


@operator("aten.selu", layout="any")
def selu(x: Tensor) -> Tensor:
    """Compute the scaled exponential linear unit."""
    return elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@operator("aten.gelu", layout="any")
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Compute x Φ(x)."""
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@operator("aten.softplus", layout="any")
def softplus(x: Tensor, beta: Number = 1, threshold: Number = 20) -> Tensor:
    """Compute log(1 + exp(beta x)) / beta; x itself above the threshold."""
    near = jnp.where(x * beta > threshold, 0, x)
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(near * beta) / beta)


@operator("aten.mish", layout="any")
def mish(x: Tensor) -> Tensor:
    """Compute x tanh(softplus(x))."""
    return x * jnp.tanh(softplus(x))


@operator("aten.log_sigmoid", layout="any")
def log_sigmoid(x: Tensor) -> Tensor:
    """Compute log(sigmoid(x))."""
    return jax.nn.log_sigmoid(x)


@operator("aten.logit", layout="any")
def logit(x: Tensor, eps: Number | None = None) -> Tensor:
    """Compute log(x / (1 - x))."""
    x = x if eps is None else clamp(x, eps, 1 - eps)
    return jnp.log(x) - jnp.log1p(-x)


@operator("aten.threshold", layout="any")
def threshold(x: Tensor, threshold: Number, value: Number) -> Tensor:
    """Return x above the threshold, or else the value."""
    return jnp.where(x > threshold, x, value)


@operator("aten.nan_to_num", layout="any")
def nan_to_num(
    x: Tensor, nan: Number | None = None, posinf: Number | None = None, neginf: Number | None = None
) -> Tensor:
    """Replace what is not finite."""
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@operator("aten._to_copy", layout="any")
def to_copy(x: Tensor, dtype: jnp.dtype | None = None) -> Tensor:
    """Convert to another type, floating-point numbers to whole ones by truncation."""
    return x if dtype is None else x.astype(dtype)


@operator("aten.clone", "aten.alias", "aten.lift_fresh_copy", "aten.contiguous", layout="any")
def same(x: Tensor) -> Tensor:
    """Return the tensor."""
    return x


@operator("fedsolve.stop", layout="any")
def stop(x: Tensor) -> Tensor:
    """Return the tensor without its derivative."""
    return lax.stop_gradient(x)


@operator("aten.copy", layout="first")
def copy(x: Tensor, y: Tensor) -> Tensor:
    """Return y in the shape and type of x."""
    return jnp.broadcast_to(y, x.shape).astype(x.dtype)


@operator("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(
    x: Tensor, y: Tensor, weight: Maybe = None, pos_weight: Maybe = None, reduction: int = 1
) -> Tensor:
    """Compute the cross-entropy of sigmoid(x) and y."""
    one = 1 if pos_weight is None else 1 + (pos_weight - 1) * y
    loss = (1 - y) * x + one * jax.nn.softplus(-x)
    return reduced(loss if weight is None else loss * weight, reduction)


@jax.custom_jvp
def _entropy(x: Tensor, y: Tensor) -> Tensor:
    """Compute -y log x - (1 - y) log(1 - x), with logarithms of at least -100."""
    log_x, log_rest = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
    return (y - 1) * log_rest - y * log_x


@_entropy.defjvp
def _entropy_derivative(primals: tuple, tangents: tuple) -> tuple[Tensor, Tensor]:
    """Compute PyTorch's derivative, whose denominator is at least 1e-12."""
    (x, y), (dx, dy) = primals, tangents
    log_x, log_rest = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
    slope = (x - y) / jnp.maximum((1 - x) * x, 1e-12)
    return _entropy(x, y), slope * dx + (log_rest - log_x) * dy


@operator("aten.binary_cross_entropy.default")
def binary_cross_entropy(x: Tensor, y: Tensor, weight: Maybe = None, reduction: int = 1) -> Tensor:
    """Compute the cross-entropy of rates x and y."""
    loss = _entropy(x, y)
    return reduced(loss if weight is None else loss * weight, reduction)


@operator("aten.huber_loss.default")
def huber(x: Tensor, y: Tensor, reduction: int = 1, delta: Number = 1) -> Tensor:
    """Compute squares near 0 and distances far out."""
    away = jnp.abs(x - y)
    near = jnp.where(away <= delta, away, 0)
    return reduced(jnp.where(away <= delta, near**2 / 2, delta * (away - delta / 2)), reduction)


@operator("aten.smooth_l1_loss.default")
def smooth_l1(x: Tensor, y: Tensor, reduction: int = 1, beta: Number = 1) -> Tensor:
    """Compute the Huber loss over beta; distances if beta is 0."""
    if beta == 0:
        return reduced(jnp.abs(x - y), reduction)
    return huber(x, y, reduction, beta) / beta


def reduced(loss: Tensor, reduction: int) -> Tensor:
    """Return the losses (0), their mean (1) or their sum (2)."""
    return (loss, jnp.mean(loss), jnp.sum(loss))[reduction]
