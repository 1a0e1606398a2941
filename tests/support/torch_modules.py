"""PyTorch modules to compile, and the comparison of a compiled function with PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedsolve.problem.samples import Samples
from fedsolve.torch.compiled import Compiled
from fedsolve.torch.module import Network


def mean_square(model, data):
    return F.mse_loss(model(data["x"])[:, 0], data["y"])


def cross_entropy(model, data):
    return F.cross_entropy(model(data["x"]), data["c"])


def in_both(module, loss, data, precision="float64", training=True, key=0):
    """Values, gradients and new buffers of one client: ours, and PyTorch's."""
    (ours, expected), *_ = over_clients(module, loss, [data], precision, training, key)
    return ours, expected


def over_clients(module, loss, clients, precision="float64", training=True, key=0, shift=0.0):
    """The same for several clients, mapped, each at parameters of its own."""
    dtype = getattr(torch, precision)
    with jax.enable_x64(precision == "float64"):
        network = Network(module)
        data = jax.tree.map(lambda *leaves: torch.stack(leaves).numpy(), *clients)
        compiled = Compiled("loss", loss, network, Samples(data))
        scales = 1 + shift * np.arange(len(clients))
        params = {
            name: np.stack([p * s for s in scales]).astype(precision)
            for name, p in network.params.items()
        }
        buffers = {
            name: jnp.asarray(b.astype(precision) if b.dtype.kind == "f" else b)
            for name, b in network.buffers.items()
        }
        keys = jax.random.split(jax.random.key(key), len(clients))

        def one(params, data, key):
            return compiled(params, data, key if training else None, buffers)

        step = jax.vmap(jax.value_and_grad(one, has_aux=True))
        (values, after), slopes = jax.jit(step)(params, data, keys)
    found = []
    for i, (own, scale) in enumerate(zip(clients, scales, strict=True)):
        copy = network.fresh(dtype, training)
        with torch.no_grad():
            for p in copy.parameters():
                p.mul_(float(scale))
        seen = {k: v.to(dtype) if v.is_floating_point() else v for k, v in own.items()}
        value = loss(copy, seen)
        named = dict(copy.named_parameters())
        slope = torch.autograd.grad(
            value, list(named.values()), allow_unused=True, materialize_grads=True
        )
        ours = values[i], {n: slopes[n][i] for n in slopes}, {n: b[i] for n, b in after.items()}
        theirs = value.detach(), dict(zip(named, slope, strict=True)), dict(copy.named_buffers())
        found.append((ours, theirs))
    return found


def assert_exact(ours, expected, tolerance):
    for mine, theirs in zip(ours, expected, strict=True):
        mine = mine if isinstance(mine, dict) else {"value": mine}
        theirs = theirs if isinstance(theirs, dict) else {"value": theirs}
        assert mine.keys() == theirs.keys()
        for name, array in mine.items():
            want = theirs[name].numpy()
            close = {"rtol": tolerance, "atol": tolerance * max(1.0, float(np.abs(want).max()))}
            np.testing.assert_allclose(array, want, err_msg=name, **close)


class Block(nn.Module):
    """ResNet's basic block, with torchvision's names."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = None
        if stride != 1 or before != after:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """torchvision's `resnet18`, with its names; `width` 64 is the original."""

    def __init__(self, classes=1000, width=64):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for i in range(4):
            blocks = Block(widths[i], widths[i + 1], 1 if i == 0 else 2), None
            layer = nn.Sequential(blocks[0], Block(widths[i + 1], widths[i + 1], 1))
            setattr(self, f"layer{i + 1}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class VisionTransformer(nn.Module):
    """Patches, a class token, positions, and encoder layers."""

    def __init__(self, side=8, patch=4, width=8, classes=3):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.encoder(x))[:, 0])
