"""Partitions: every sample exactly once, sizes and classes as requested."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import fedsolve as fs
from fedsolve.data import partitions

CIFAR = np.tile(np.arange(10), 500)  # balanced, as CIFAR-10 is


def counts(parts, labels):
    kinds = np.unique(labels)
    return np.asarray([[np.sum(labels[own] == kind) for kind in kinds] for own in parts])


def assert_whole(parts, labels):
    """Every sample exactly once, in order within a client."""
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert all(np.all(np.diff(own) > 0) for own in parts)


SPLITS = {
    "iid": lambda y, n, seed: partitions.iid(y, n, seed),
    "two_groups": lambda y, n, seed: partitions.two_groups(y, n, seed),
    "uneven": lambda y, n, seed: partitions.uneven(y, np.arange(1, n + 1), 0.5, seed),
    "by_size": lambda y, n, seed: partitions.by_size(y, np.arange(1, n + 1), seed),
    "dirichlet": lambda y, n, seed: partitions.dirichlet(y, n, 1.0, seed),
    "shards": lambda y, n, seed: partitions.shards(y, n, 2, seed),
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_sample_has_exactly_one_client(split, data):
    clients = data.draw(st.integers(2, 6))
    sizes = data.draw(st.lists(st.integers(10, 60), min_size=2, max_size=5))
    seed = data.draw(st.integers(0, 2**31))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)) * 3, sizes))
    parts = split(labels, clients, seed)
    assert len(parts) == clients
    assert_whole(parts, labels)
    assert min(map(len, parts)) > 0
    for own, same in zip(parts, split(labels, clients, seed), strict=True):
        np.testing.assert_array_equal(own, same)


def test_iid_is_distr_1():
    parts = partitions.iid(CIFAR, 10, seed=1)
    np.testing.assert_array_equal(counts(parts, CIFAR), np.full((10, 10), 50))
    assert not np.array_equal(parts[0], partitions.iid(CIFAR, 10, seed=2)[0])


def test_two_groups_is_distr_2():
    table = counts(partitions.two_groups(CIFAR, 10, seed=1), CIFAR)
    np.testing.assert_array_equal(table.sum(axis=1), np.full(10, 500))
    assert table[:5, 5:].sum() == 0
    assert table[5:, :5].sum() == 0
    assert np.std(table[:5, :5], axis=0).min() > 20  # the number of a class varies over clients


def test_uneven_is_distr_3():
    shares = np.asarray([10.6, 7.4, 12.0, 11.4, 8.8, 14.6, 10.0, 5.4, 10.2, 9.2]) / 100
    tables = np.stack([counts(partitions.uneven(CIFAR, seed=s), CIFAR) for s in range(20)])
    sizes = tables.sum(axis=2)
    assert np.all(sizes == sizes[0])
    np.testing.assert_allclose(sizes[0], 5000 * shares / shares.sum(), atol=1)
    # Dirichlet(1/2) over ten classes: the sum of squared shares is (α + 1)/(10 α + 1) = 1/4
    mixtures = tables / sizes[..., None]
    assert np.mean(np.sum(mixtures**2, axis=2)) == pytest.approx(0.25, abs=0.04)


def test_dirichlet_follows_its_distribution():
    """Shares of a class over n clients: mean 1/n, variance (1/n)(1 − 1/n)/(nα + 1)."""
    labels, n, alpha = np.repeat([0, 1], 2000), 5, 2.0
    shares = np.concatenate(
        [
            counts(partitions.dirichlet(labels, n, alpha, seed), labels).T / 2000
            for seed in range(100)
        ]
    )
    np.testing.assert_allclose(shares.mean(axis=0), 1 / n, atol=0.03)
    assert np.var(shares) == pytest.approx(0.2 * 0.8 / (n * alpha + 1), rel=0.15)
    even = counts(partitions.dirichlet(labels, n, 1e6, 0), labels)
    np.testing.assert_allclose(even, 400, atol=3)


def test_by_size_keeps_sizes_and_mixture():
    labels = np.repeat([0, 1], [900, 300])
    parts = partitions.by_size(labels, [100, 300, 800], seed=3)
    assert list(map(len, parts)) == [100, 300, 800]
    np.testing.assert_array_equal(counts(parts, labels), [[75, 25], [225, 75], [600, 200]])


def test_shards_give_few_classes_each():
    parts = partitions.shards(CIFAR, 50, 2, seed=0)
    assert {len(own) for own in parts} == {100}
    table = counts(parts, CIFAR) > 0
    assert table.sum(axis=1).max() <= 2


def test_pieces_are_dealt_at_random():
    """With one class in each piece, a client gets each pair of classes equally often."""
    labels = np.repeat(np.arange(4), 3)
    pairs = []
    for seed in range(600):
        part = partitions.shards(labels, clients=2, each=2, seed=seed)[0]
        pairs.append(tuple(np.unique(labels[part])))
    counts = Counter(pairs)
    assert len(counts) == 6
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def test_by_id_is_one_client_for_each_value():
    ids = np.asarray(["b", "a", "b", "c", "a", "b"])
    parts = partitions.by_id(ids)
    assert [own.tolist() for own in parts] == [[1, 4], [0, 2, 5], [3]]


def test_taken_parts_are_the_clients_data():
    data = {"x": np.arange(12).reshape(6, 2), "y": np.arange(6)}
    clients = partitions.take(data, partitions.by_id([0, 1, 1, 0, 1, 1]))
    assert clients[0]["y"].tolist() == [0, 3]
    stacked = fs.stack_clients(clients)
    assert stacked["mask"].sum(axis=1).tolist() == [2, 4]


def test_the_picture_shows_every_client_and_class(tmp_path):
    parts = partitions.uneven(CIFAR, seed=0)
    figure = partitions.plot(parts, CIFAR, path=tmp_path / "who.png")
    (axis,) = figure.axes
    widths = [[bar.get_width() for bar in group] for group in axis.containers]
    np.testing.assert_array_equal(np.transpose(widths), counts(parts, CIFAR))
    assert (tmp_path / "who.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: partitions.iid([], 3), "Labels must be a list"),
        (lambda: partitions.iid(np.zeros((2, 2)), 3), r"got shape \(2, 2\)"),
        (lambda: partitions.iid([0, 1], 3), "too few for these 3 clients"),
        (lambda: partitions.iid(CIFAR, 0), "clients must be a whole number from 1 up"),
        (lambda: partitions.two_groups(np.zeros(9), 3), "two clients and two classes, got 3 and 1"),
        (lambda: partitions.by_size(CIFAR, [1, -2]), "Sizes must be positive"),
        (lambda: partitions.dirichlet(CIFAR, 5, -1.0), "alpha must be positive"),
        (lambda: partitions.dirichlet(CIFAR, 400, 0.01), "take a larger alpha or fewer clients"),
        (lambda: partitions.shards([0, 1, 1], 2, 2), "3 samples cannot be cut into 4 pieces"),
        (lambda: partitions.plot([np.arange(2)], [0, 1], ["a"]), "2 classes, but 1 names"),
    ],
)
def test_bad_input_raises(call, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        call()
