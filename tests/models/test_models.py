"""Networks for images, image augmentation, and federated runs with both."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve import models
from fedsolve.algorithms.moon import similarity
from fedsolve.models import layers
from fedsolve.problems import image_losses
from fedsolve.problems.augmentation import augmented
from tests.support import examples

SMALL = {
    "mlp": lambda key: models.MLP((32, 32, 3), hidden=5, key=key),
    "cnn": lambda key: models.CNN((32, 32, 3), width=2, hidden=6, key=key),
    "resnet18": lambda key: models.ResNet18((32, 32, 3), width=4, key=key),
    "vit": lambda key: models.VisionTransformer((32, 32, 3), width=8, depth=2, heads=2, key=key),
}
FEATURES = {"mlp": 5, "cnn": 6, "resnet18": 32, "vit": 8}


def count(make):
    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes) if hasattr(leaf, "size"))


def pictures(count, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 32, 32, 3), np.uint8)


def test_the_networks_have_as_many_parameters_as_they_should():
    assert count(lambda key: models.ResNet18((32, 32, 3), key=key)) == 11_173_962
    dense, convolutions = 64 * 49 * 128 + 128, 9 * 32 + 32 + 9 * 32 * 64 + 64
    assert count(lambda key: models.CNN((28, 28, 1), key=key)) == convolutions + dense + 1290
    assert count(lambda key: models.MLP((28, 28, 1), hidden=7, key=key)) == 785 * 7 + 80
    block = 2 * 2 * 128 + 128 * 4 * 128 + 4 * 128 + 2 * 2 * 128 * 128 + 3 * 128
    rest = (48 + 1) * 128 + 64 * 128 + 2 * 128 + 1290
    assert count(lambda key: models.VisionTransformer((32, 32, 3), key=key)) == 6 * block + rest


@pytest.mark.parametrize("name", SMALL)
def test_scores_and_representations_have_a_row_for_each_image(name):
    network = SMALL[name](jax.random.key(0))
    x = jnp.asarray(pictures(3), jnp.float32) / 255

    @eqx.filter_jit
    def look(network, x):
        return network(x), network.represent(x)

    scores, rows = look(network, x)
    assert scores.shape == (3, 10)
    assert rows.shape == (3, FEATURES[name])
    # An image's scores do not depend on those beside it.
    np.testing.assert_allclose(look(network, x[:1])[0][0], scores[0], atol=1e-3)
    # Mixed precision: the type of the images, and nearly the same numbers.
    rough = look(network, x.astype(jnp.bfloat16))[0]
    assert rough.dtype == jnp.bfloat16
    np.testing.assert_allclose(rough.astype(float), scores, atol=0.1 + 0.1 * np.ptp(scores))


def test_convolutions_and_groups_are_what_equinox_computes(monkeypatch):
    keys = jax.random.split(jax.random.key(1), 2)
    convolution = eqx.nn.Conv2d(4, 6, 3, stride=2, padding=1, key=keys[0])
    x = jax.random.normal(keys[1], (2, 8, 8, 4))
    one_by_one = jax.vmap(convolution)(jnp.moveaxis(x, -1, 1))
    for device in ("gpu", "cpu"):  # by the library, and by products
        monkeypatch.setattr(jax, "default_backend", lambda device=device: device)
        np.testing.assert_allclose(
            layers.convolve(convolution, x), jnp.moveaxis(one_by_one, 1, -1), atol=1e-5
        )
    ours = models.GroupNorm(4, groups=2)
    ours = eqx.tree_at(lambda n: (n.weight, n.bias), ours, (x[0, 0, 0], x[0, 0, 1]))
    theirs = eqx.nn.GroupNorm(2, 4)
    theirs = eqx.tree_at(lambda n: (n.weight, n.bias), theirs, (x[0, 0, 0], x[0, 0, 1]))
    expected = jnp.moveaxis(jax.vmap(theirs)(jnp.moveaxis(x, -1, 1)), 1, -1)
    np.testing.assert_allclose(ours(x), expected, atol=1e-5)


def test_parameters_go_to_a_file_and_come_back(tmp_path):
    path = tmp_path / "network.safetensors"
    trained, other = (SMALL["cnn"](jax.random.key(seed)) for seed in (0, 1))
    models.save(trained, path)
    back = models.load(other, path)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    tuned = models.load(models.CNN((32, 32, 3), 7, 2, 6, key=jax.random.key(2)), path, ["head"])
    assert tuned.head.weight.shape == (7, 6)
    np.testing.assert_array_equal(tuned.first.weight, trained.first.weight)


def test_a_file_that_does_not_fit_raises(tmp_path):
    path = tmp_path / "network.safetensors"
    models.save(SMALL["cnn"](jax.random.key(0)), path)
    with pytest.raises(
        fs.InvalidInput, match=r"head.weight has the shape \[10, 6\] in .* is \[10, 9\]"
    ):
        models.load(models.CNN((32, 32, 3), width=2, hidden=9, key=jax.random.key(0)), path)
    with pytest.raises(fs.InvalidInput, match=r"has no first.weight, which|has the shape"):
        models.load(SMALL["mlp"](jax.random.key(0)), path)
    with pytest.raises(fs.InvalidInput, match="which the model has no place for"):
        models.load({"head": SMALL["cnn"](jax.random.key(0)).head}, path)
    path.write_text("no such thing")
    with pytest.raises(fs.InvalidInput, match="cannot be read as safetensors"):
        models.load(SMALL["mlp"](jax.random.key(0)), path)
    with pytest.raises(fs.InvalidInput, match="whole patches"):
        models.VisionTransformer((30, 30, 3), key=jax.random.key(0))


def test_augmented_images_are_moved_and_mirrored_ones_by_key():
    x = pictures(40)
    one = augmented(jax.random.key(0), jnp.asarray(x))
    assert one.shape == x.shape
    assert one.dtype == np.uint8
    np.testing.assert_array_equal(one, augmented(jax.random.key(0), jnp.asarray(x)))
    assert (one != augmented(jax.random.key(1), jnp.asarray(x))).any()
    wide = np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)))
    mirrored = 0
    for i, image in enumerate(np.asarray(one)):
        found = [
            flip
            for down in range(9)
            for right in range(9)
            for flip in (1, -1)
            if (wide[i, down : down + 32, right : right + 32][:, ::flip] == image).all()
        ]
        assert len(found) == 1
        mirrored += found[0] == -1
    assert 8 < mirrored < 32
    digits = augmented(jax.random.key(0), jnp.asarray(x), flip=False)
    same = [(digits[i] == one[i]).all() for i in range(40)]
    assert sum(same) == 40 - mirrored


def test_many_images_are_evaluated_in_pieces_with_the_same_mean(monkeypatch):
    network = SMALL["mlp"](jax.random.key(0))
    y, mask = np.arange(11) % 10, np.arange(11) < 9
    data = {"x": jnp.asarray(pictures(11)), "y": jnp.asarray(y, jnp.uint8)}
    loss = image_losses.CrossEntropy(None, True)
    whole = loss(network, jax.tree.map(lambda leaf: leaf[:9], data))
    slopes = jax.grad(loss)(network, data | {"mask": mask})
    monkeypatch.setattr(image_losses, "CHUNK", 4)
    np.testing.assert_allclose(loss(network, data | {"mask": mask}), whole, rtol=1e-6)
    for one, other in zip(
        jax.tree.leaves(slopes),
        jax.tree.leaves(jax.grad(loss)(network, data | {"mask": mask})),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.fixture(scope="module")
def tiny():
    """CIFAR-10's first images over the paper's uneven clients, by a dense network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDSOLVE_DATA", str(examples.DATA))
        return fs.problems.images(
            *("cifar10", "mlp", "uneven"),
            hidden=16,
            batch_size=16,
            samples=300,
            augment=True,
            standardize=True,
            validation=0.05,
        )


@examples.needs_data("cifar10")
def test_clients_are_those_of_the_paper_and_the_server_holds_some(tiny):
    sizes = np.asarray(tiny.samples.mask).sum(axis=1)
    np.testing.assert_allclose(sizes / 2.85, fs.partitions.PERCENT, atol=0.5)
    assert len(tiny.validation["y"]) == 15
    assert tiny.samples.values["x"].dtype == np.uint8
    pooled = tiny.pooled()
    assert (pooled.n, pooled.augment) == (1, "crop and flip")


@examples.needs_data("cifar10")
def test_minibatches_are_augmented_and_evaluations_are_not(tiny):
    placed = tiny.on_device()
    one = jax.tree.map(lambda leaf: leaf[0], placed.samples)
    client = placed.client(one, placed.start(), jnp.int32(0), jnp.int32(0), jax.random.key(3))
    seen, drawn = client._draw_samples(None), one.draw(jax.random.key(3), 16)
    np.testing.assert_array_equal(seen.values["y"], drawn.values["y"])
    assert (seen.values["x"] != drawn.values["x"]).any()
    found = placed.values(placed.start(), one, None)["objective"]
    np.testing.assert_allclose(found, placed.value(placed.start(), one))


@examples.needs_data("cifar10")
@pytest.mark.parametrize("name", ["PPBC", "MOON"])
def test_federated_training_lowers_the_loss(tiny, name):
    local = {"local_steps": 20, "local_optimizer": fs.Adam(1e-3)}
    three = fs.participation.Top(3)
    algorithm = {
        "PPBC": fs.PPBC(1.0, weighting="BANT", select_epoch=three, epoch_length=2, **local),
        "MOON": fs.MOON(1.0, weighting="GradientNorm", selection=three, **local),
    }[name]
    history = fs.solve(tiny, algorithm, rounds=4, clients_at_once=1).history
    assert history["objective"][-1] < history["objective"][0] - 0.03
    assert 0 <= history["test_accuracy"][-1] <= 1


def test_rows_without_a_direction_have_a_slope_that_is_finite():
    z = jnp.asarray([[0.0, 0.0], [3.0, 4.0]])
    value, slope = jax.value_and_grad(lambda z: similarity(z, z[::-1] + 1).sum())(z)
    assert np.isfinite(value)
    assert np.isfinite(slope).all()
    np.testing.assert_allclose(similarity(z, jnp.asarray([[1.0, 0], [1.0, 0]])), [0, 0.6])


def test_bad_options_raise():
    for options, sentence in (
        ({"compute": "float8"}, "compute must be"),
        ({"augment": True, "batch_size": None}, "give a batch_size"),
        ({"model": "mlp", "width": 3}, "mlp has no width; it has hidden"),
        ({"model": "cnn", "width": 0}, "width must be a whole number"),
    ):
        with pytest.raises(fs.InvalidInput, match=sentence):
            fs.problems.images(**options)


@examples.needs_data("mnist")
def test_bad_partitions_raise(monkeypatch):
    monkeypatch.setenv("FEDSOLVE_DATA", str(examples.DATA))
    for options, sentence in (
        ({"partition": "odd"}, "partition must be one of equal, iid"),
        ({"partition": "uneven", "clients": 3}, "ten sizes for ten clients"),
        ({"validation": 1.5}, "validation must be a share"),
    ):
        with pytest.raises(fs.InvalidInput, match=sentence):
            fs.problems.images(samples=100, **options)
