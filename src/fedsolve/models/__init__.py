"""Networks for images, built from JAX and Equinox alone, and models' parameters elsewhere."""

from fedsolve.models.base import Network
from fedsolve.models.cnn import CNN
from fedsolve.models.files import load, save
from fedsolve.models.layers import GroupNorm
from fedsolve.models.mlp import MLP
from fedsolve.models.resnet import Block, ResNet18
from fedsolve.models.scikit_learn import to_sklearn
from fedsolve.models.vision_transformer import Attention, VisionTransformer

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
    "to_sklearn",
]
