"""Objects that a site's process builds by name."""

import fedsolve as fs
from tests.support.conformance import ALGORITHMS


def algorithm(name: str) -> fs.Algorithm:
    """An algorithm of the conformance list."""
    return ALGORITHMS[name]


CLASSES = 10


def cifar10_cnn(clients: int = 6, samples: int = 30) -> fs.Problem:
    """A convolutional PyTorch network with dropout and batch normalisation on CIFAR-10, whose worst
    class is bounded."""
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F

    import fedsolve.torch

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(8 * 8 * 8, CLASSES),
    )

    def each(model, data):
        return F.cross_entropy(model(data["x"]), data["y"], reduction="none")

    def loss(model, data):
        return each(model, data).mean()

    found = fs.datasets.load("cifar10").train
    count = clients * samples
    images = np.moveaxis(found["x"][:count], -1, 1).astype(np.float32) / 127.5 - 1
    data = {
        "x": images.reshape(clients, samples, *images.shape[1:]),
        "y": found["y"][:count].astype(np.int64).reshape(clients, samples),
    }
    names = [f"class {label}" for label in range(CLASSES)]
    worst = fs.constraints.group_loss(each, at_most=2.25, group="y", groups=names)
    return fedsolve.torch.problem(network, loss, data, worst, mode="compiled", batch_size=10)
