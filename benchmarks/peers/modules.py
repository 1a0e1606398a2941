"""The modules and losses of the works with PyTorch, as people write them."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))  # for tests.support


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 1))


def cnn() -> nn.Module:
    """pfl's network for CIFAR-10."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(14 * 14 * 64, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def resnet() -> nn.Module:
    from tests.support.torch_modules import ResNet18

    return ResNet18(10)


def binary(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(data["x"])[:, 0], data["y"])


def pictures(x: torch.Tensor) -> torch.Tensor:
    """Images (batch, 32, 32, 3) of bytes, as PyTorch wants them."""
    return x.permute(0, 3, 1, 2).float() / 255


def entropy(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(pictures(data["x"])), data["y"])


def accuracy(model: nn.Module, test: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(pictures(test["x"])).argmax(dim=1) == test["y"]).float().mean()


MODULES = {
    "torch": (perceptron, binary),
    "cifar10": (cnn, entropy),
    "resnet": (resnet, entropy),
}
