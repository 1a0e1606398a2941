"""Networks that need nothing but JAX and Equinox, with save and load."""

from fedsolve.models.networks import (
    CNN,
    MLP,
    Attention,
    Block,
    GroupNorm,
    Network,
    ResNet18,
    VisionTransformer,
    load,
    save,
)

__all__ = [
    "CNN",
    "MLP",
    "Attention",
    "Block",
    "GroupNorm",
    "Network",
    "ResNet18",
    "VisionTransformer",
    "load",
    "save",
]
