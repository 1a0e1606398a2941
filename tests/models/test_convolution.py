"""Convolutions and pooling by matrix products: values and gradients are PyTorch's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedsolve.models import convolution
from fedsolve.models.convolution import convolve2d, max_pool2d, sum_pool2d

torch = pytest.importorskip("torch")

CASES = {
    "plain": {},
    "stride": {"stride": (2, 1), "padding": ((1, 1), (2, 2))},
    "dilation": {"dilation": (2, 3), "padding": ((2, 2), (0, 0))},
    "groups": {"groups": 2, "padding": ((1, 1), (1, 1))},
    "depthwise": {"groups": 4, "stride": (2, 2)},
}
POOLS = {
    "side by side": {"size": (2, 2)},
    "one over": {"size": (3, 2)},
    "overlapping": {"size": (3, 3), "stride": (2, 2), "padding": ((1, 1), (1, 1))},
    "dilated": {"size": (2, 2), "stride": (1, 2), "dilation": (2, 1)},
}


def first(image):
    return torch.from_numpy(np.moveaxis(np.asarray(image), -1, 1).copy()).requires_grad_()


def last(tensor):
    return np.moveaxis(tensor.detach().numpy(), 1, -1)


def same(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [1, 20_000, 2**23])  # one image, two and all at once
@pytest.mark.parametrize("name", CASES)
def test_convolutions_and_their_gradients_are_pytorchs(name, chunk, monkeypatch):
    monkeypatch.setattr(convolution, "CHUNK", chunk)
    given = CASES[name]
    groups, rng = given.get("groups", 1), np.random.default_rng(0)
    maps, weight = rng.standard_normal((4, 8, 7, 4)), rng.standard_normal((6, 4 // groups, 3, 2))
    if name == "depthwise":
        weight = rng.standard_normal((8, 1, 3, 2))
    x, w = first(maps), torch.from_numpy(weight).requires_grad_()
    padding = [sides[0] for sides in given.get("padding", ((0, 0), (0, 0)))]
    options = {k: v for k, v in given.items() if k != "padding"}
    theirs = torch.nn.functional.conv2d(x, w, padding=padding, **options)
    slope = rng.standard_normal(theirs.shape)
    theirs.backward(torch.from_numpy(slope))
    with jax.enable_x64(True):
        ours, back = jax.vjp(
            lambda maps, weight: convolve2d(maps, weight, **given),
            jnp.asarray(maps),
            jnp.asarray(weight),
        )
        to_maps, to_weight = back(jnp.moveaxis(jnp.asarray(slope), 1, -1))
        same(ours, last(theirs))
        same(to_maps, last(x.grad))
        same(to_weight, w.grad)


def test_each_client_may_have_its_own_weights(monkeypatch):
    monkeypatch.setattr(convolution, "CHUNK", 1)
    rng = np.random.default_rng(0)
    maps, weights = rng.standard_normal((3, 2, 6, 6, 2)), rng.standard_normal((3, 5, 2, 3, 3))

    def total(weight, maps):
        return jnp.sum(jnp.sin(convolve2d(maps, weight, padding=((1, 1), (1, 1)))))

    with jax.enable_x64(True):
        found = jax.vmap(jax.grad(total))(jnp.asarray(weights), jnp.asarray(maps))
        for own, weight, mine in zip(found, weights, maps, strict=True):
            w = torch.from_numpy(weight).requires_grad_()
            torch.nn.functional.conv2d(first(mine), w, padding=1).sin().sum().backward()
            same(own, w.grad)


@pytest.mark.parametrize("name", POOLS)
def test_maxima_and_their_gradients_are_pytorchs(name):
    given, rng = POOLS[name], np.random.default_rng(0)
    maps = np.maximum(rng.standard_normal((2, 8, 7, 3)), 0)  # with ties at zero
    x = first(maps)
    padding = [sides[0] for sides in given.get("padding", ((0, 0), (0, 0)))]
    options = {k: v for k, v in given.items() if k not in ("size", "padding")}
    theirs = torch.nn.functional.max_pool2d(x, given["size"], padding=padding, **options)
    slope = rng.standard_normal(theirs.shape)
    theirs.backward(torch.from_numpy(slope))
    with jax.enable_x64(True):
        ours, back = jax.vjp(lambda maps: max_pool2d(maps, **given), jnp.asarray(maps))
        same(ours, last(theirs))
        same(back(jnp.moveaxis(jnp.asarray(slope), 1, -1))[0], last(x.grad))


def test_sums_of_windows_are_averages_times_their_size():
    maps = np.random.default_rng(0).standard_normal((2, 7, 8, 3))
    theirs = torch.nn.functional.avg_pool2d(first(maps), (2, 3), (2, 1), (1, 1))
    with jax.enable_x64(True):
        ours = sum_pool2d(jnp.asarray(maps), (2, 3), (2, 1), ((1, 1), (1, 1)))
        same(ours / 6, last(theirs))
