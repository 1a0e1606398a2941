"""Compressors, the packets that they make, and error feedback.

A new compressor is a class in `compressors.py` and a name here: `fedsolve` exports it, and
configuration files can name it.
"""

from fedsolve.compression.compressors import (
    QSGD,
    Compose,
    Compressor,
    Float4,
    Float8,
    Float16,
    Identity,
    RandK,
    TopK,
)
from fedsolve.compression.packets import Packet

__all__ = [
    "QSGD",
    "Compose",
    "Compressor",
    "Float4",
    "Float8",
    "Float16",
    "Identity",
    "Packet",
    "RandK",
    "TopK",
]
