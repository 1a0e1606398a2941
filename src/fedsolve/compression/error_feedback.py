"""Error feedback: what a compressor drops is sent later.

EF14 (uplink)     v = C(e + Δ),  e ← e + Δ − v:  e is the part that a client has not sent yet
EF21-P (downlink) w ← w + C(x − w):  the server sends the difference to the clients' w
"""

from __future__ import annotations

import jax.numpy as jnp

from fedsolve.compression.clipping import limit
from fedsolve.compression.compressors import Compressor
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput
from fedsolve.fields import Scalar
from fedsolve.types import PRNGKey, Vector


def no_residual(uplink: Compressor, w: Vector) -> Vector | None:
    """Return the residual before the first round: zero, or None for an unbiased compressor."""
    return None if uplink.unbiased else jnp.zeros_like(w)


def with_feedback(
    uplink: Compressor,
    residual: Vector | None,
    v: Vector,
    key: PRNGKey,
    clip: Scalar | None = None,
) -> tuple[Vector | None, Packet]:
    """Compress v with error feedback (EF14).

    With a bound `clip`, what is sent is the clipped packet, and the residual keeps the rest.

    Args:
        uplink: The compressor.
        residual: What was not sent yet; None for no error feedback.
        v: The vector to send.
        key: A random key.
        clip: The largest norm of what is sent; None for any norm.

    Returns:
        The next residual, and the packet.
    """
    packet = uplink(v if residual is None else residual + v, key)
    if clip is not None:
        packet = limit(packet, clip)
    if residual is None:
        return None, packet
    return residual + v - packet.dense(), packet


def check_downlink(downlink: Compressor) -> None:
    """Raise if EF21-P cannot use the compressor."""
    if not downlink.contractive:
        raise InvalidInput(
            "The downlink must be contractive, as EF21-P needs it: "
            f"{type(downlink).__name__} is unbiased (RandK(unbiased=False) would do)."
        )
