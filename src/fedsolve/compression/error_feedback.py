"""Error feedback: what a compressor drops is not lost, but sent later.

EF14 (uplink)     v = C(e + Δ),  e ← e + Δ − v:  the client keeps what it has not sent yet
EF21-P (downlink) w ← w + C(x − w):  the server sends what the clients' w still lacks of its x
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from fedsolve.compression.compressors import Compressor
from fedsolve.compression.packets import Packet
from fedsolve.errors import InvalidInput


def no_residual(uplink: Compressor, w: Float[Array, " d"]) -> Float[Array, " d"] | None:
    """What a client has not sent yet, at first: nothing. None where there never will be any."""
    return None if uplink.unbiased else jnp.zeros_like(w)


def with_feedback(
    uplink: Compressor, residual: Float[Array, " d"] | None, v: Float[Array, " d"], key: Any
) -> tuple[Float[Array, " d"] | None, Packet]:
    """EF14: sends residual + v as far as the compressor lets it, and keeps the rest for later; an
    unbiased compressor needs none of that. The residual after, and the packet."""
    if residual is None:
        return None, uplink(v, key)
    packet = uplink(residual + v, key)
    return residual + v - packet.dense(), packet


def check_downlink(downlink: Compressor) -> None:
    """Refuses a downlink that EF21-P cannot use."""
    if not downlink.contractive:
        raise InvalidInput(
            "The downlink must be contractive, as EF21-P needs it: "
            f"{type(downlink).__name__} is unbiased (RandK(unbiased=False) would do)."
        )
