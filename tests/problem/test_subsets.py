"""Subsets and minibatches are of samples, whatever the form in which clients store them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse import csr_matrix

import fedsolve as fs
from fedsolve import games
from fedsolve.problem.samples import Samples, counts
from fedsolve.problem.stacking import pool
from tests.support.clients import client

SIZES = [12, 7, 9]
W = jnp.asarray([0.3, -0.2, 0.5, 0.1])
KINDS = ("dense", "masked", "sets", "sparse")


def sparse_rows(count, size=4, seed=0):
    """Rows from empty to full, so that samples have 1 to 2 pieces of width 2."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((count, size)) * (rng.random((count, size)) < 0.6)
    dense[0], dense[1] = 0, 1
    return csr_matrix(dense.astype(np.float32)), (rng.random(count) < 0.5).astype(np.float32)


def problem_of(kind, **options):
    rng = np.random.default_rng(1)
    if kind == "sparse":
        return fs.problems.sparse_regression(*sparse_rows(28), 3, width=2, seed=3, **options)
    if kind == "sets":
        clients = fs.stack_clients(
            [{"a": rng.standard_normal((k, 4)), "b": rng.standard_normal((5, 4))} for k in SIZES]
        )

        def loss(w, data):
            a, b = (jnp.logaddexp(0, data[name] @ w) for name in ("a", "b"))
            on = data["mask"]
            apart = jnp.mean(a, where=on["a"]) + 2 * jnp.mean(b, where=on["b"])
            together = jnp.sum(a, where=on["a"]) - jnp.sum(b, where=on["b"])
            return apart + together / (jnp.sum(on["a"]) + jnp.sum(on["b"]))

        return fs.Problem(loss, clients, np.zeros(4), **options)
    sizes = SIZES if kind == "masked" else [9] * 3
    data = [{"x": rng.standard_normal((k, 4)), "y": rng.standard_normal(k)} for k in sizes]
    clients = dict(fs.stack_clients(data))
    if kind == "dense":
        del clients["mask"]
    return fs.Problem(
        lambda w, d: jnp.mean((d["x"] @ w - d["y"]) ** 2), clients, np.zeros(4), **options
    )


def total(kind, index):
    extra = 5 if kind == "sets" else 0
    sizes = {"dense": [9] * 3, "sparse": [10, 9, 9]}.get(kind, SIZES)
    return sizes[index] + extra


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_of_samples(kind):
    problem = problem_of(kind)
    expected = [total(kind, index) for index in range(3)]
    assert counts(problem.samples).tolist() == expected
    assert [int(client(problem, index).samples_count) for index in range(3)] == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nested", [False, True])
def test_the_mean_over_subsets_is_the_full_value(kind, nested):
    """Of the value and of the gradient; also of a subset of a subset."""
    problem, draws = problem_of(kind), 4000
    for index, count in ((0, 4), (1, 7)):
        own = client(problem, index)

        @jax.vmap
        def seen(key, own=own, count=count):
            if nested:
                key, first = jax.random.split(key)
                own = own.restricted(count + 2, first)
            own = own.restricted(count, key)
            return jnp.append(own.grad(W), own.objective(W)), own.samples_count

        found, sizes = jax.jit(seen)(jax.random.split(jax.random.key(5), draws))
        assert set(np.asarray(sizes)) == {count}
        full = jnp.append(own.grad(W), own.objective(W))
        error = found.std(axis=0) / np.sqrt(draws) + 1e-6
        assert np.all(np.abs(found.mean(axis=0) - full) < 5 * error)
        assert found.std(axis=0).max() > 1e-3 or count >= total(kind, index)


@pytest.mark.parametrize("kind", KINDS)
def test_all_samples_are_the_whole_client(kind):
    problem = problem_of(kind)
    own = client(problem, 1)
    every = own.restricted(total(kind, 1), jax.random.key(0))
    np.testing.assert_allclose(every.grad(W), own.grad(W), rtol=1e-5, atol=1e-6)


def poisoned(samples, order, mask):
    """One client's samples with NaN wherever the subset has no sample."""
    inside = np.unique(np.asarray(order)[np.asarray(mask)])

    def poison(leaf):
        leaf = np.array(leaf)
        leaf[np.setdiff1d(np.arange(len(leaf)), inside)] = np.nan
        return jnp.asarray(leaf)

    rows = samples.values["rows"]
    outside = ~np.isin(np.asarray(rows.owner), inside)
    values = np.where(outside[:, None], np.nan, rows.values["values"])
    rows = eqx.tree_at(lambda r: r.values["values"], rows, jnp.asarray(values))
    return {"rows": rows, "labels": poison(samples.values["labels"])}


@pytest.mark.parametrize("batch_size", [None, 3])
def test_sparse_samples_outside_a_subset_may_be_nan(batch_size):
    """`test_incentfedavg` has this for dense and masked clients, in a run."""
    problem = problem_of("sparse", batch_size=batch_size)
    own = client(problem, 0)
    for number in range(20):
        key = jax.random.key(number)
        some = own.restricted(4, key)
        chosen = some._samples
        bad = Samples(poisoned(chosen, chosen.order, chosen.mask), own._samples.mask)
        other = client(problem, 0)
        other._samples = bad
        other = other.restricted(4, key)
        assert np.isnan(other._samples.values["labels"]).sum() == 6
        for step in range(3):
            to_draw = jax.random.fold_in(key, step)
            clean = some.grad(W, to_draw)
            assert np.isfinite(clean).all()
            np.testing.assert_array_equal(clean, other.grad(W, to_draw))


def test_sets_outside_a_subset_may_be_nan():
    problem = problem_of("sets")
    own = client(problem, 0)
    some = own.restricted(6, jax.random.key(2))
    chosen, values = some._samples, {}
    for name, leaf in chosen.values.items():
        inside = np.asarray(chosen.order[name])[np.asarray(chosen.mask[name])]
        values[name] = np.array(leaf)
        values[name][np.setdiff1d(np.arange(len(leaf)), inside)] = np.nan
    other = client(problem, 0)
    other._samples = Samples(jax.tree.map(jnp.asarray, values), own._samples.mask)
    other = other.restricted(6, jax.random.key(2))
    np.testing.assert_array_equal(some.grad(W), other.grad(W))


def test_sets_keep_their_shares_on_average_and_one_sample_at_least():
    data = fs.stack_clients([{"a": np.arange(13.0), "b": np.arange(4.0), "c": np.arange(3.0)}] * 2)
    one = jax.tree.map(
        lambda leaf: jnp.asarray(leaf[0]), Samples({k: data[k] for k in "abc"}, data["mask"])
    )
    keys = jax.random.split(jax.random.key(0), 4000)
    for count in (3, 7, 19, 20):
        kept = jax.vmap(lambda key, count=count: one.subset(key, count).mask)(keys)
        sizes = np.stack([np.asarray(kept[name]).sum(axis=1) for name in "abc"], axis=1)
        assert (sizes.sum(axis=1) == count).all()
        assert (sizes >= 1).all()
        if count > 6:
            share = count * np.asarray([13, 4, 3]) / 20
            assert (np.abs(sizes - share) < 1).all()
            assert np.abs(sizes.mean(axis=0) - share).max() < 5 * 0.5 / np.sqrt(4000)


def test_minibatches_of_sparse_clients_are_samples():
    """Every sample is equally likely, with its own row and label; the gradient is unbiased."""
    problem = problem_of("sparse", batch_size=3)
    own = client(problem, 0)
    keys = jax.random.split(jax.random.key(1), 8000)
    found = jax.jit(jax.vmap(lambda key: own.grad(W, key)))(keys)
    full = client(problem_of("sparse"), 0).grad(W)
    error = found.std(axis=0) / np.sqrt(len(keys))
    assert np.all(np.abs(found.mean(axis=0) - full) < 5 * error)
    dense, labels = sparse_rows(28)
    part = np.array_split(np.random.default_rng(3).permutation(28), 3)[0]
    rows = np.column_stack([dense.toarray()[part], labels[part]])
    batch = own._samples.draw(keys[0], 50)
    cut = batch.values["rows"]
    columns, values = cut.values["columns"], cut.values["values"]
    again = np.zeros((50, 4))
    for owner, c, v in zip(cut.owner, columns, values, strict=True):
        if owner < 50:
            np.add.at(again[owner], np.asarray(c), np.asarray(v))
    drawn = np.column_stack([again, batch.values["labels"]])
    picked = {int(np.flatnonzero((rows == row).all(axis=1))[0]) for row in drawn}
    assert len(picked) > 5


def test_pooled_sparse_clients_are_all_rows():
    problem = problem_of("sparse")
    together = problem.with_clients(pool(problem.samples))
    matrix, labels = sparse_rows(28)
    alone = fs.problems.logistic_regression(matrix.toarray(), labels, 1)
    np.testing.assert_allclose(
        client(together, 0).grad(W), client(alone, 0).grad(W), rtol=1e-5, atol=1e-6
    )
    assert counts(together.samples).tolist() == [28]


def test_what_cannot_be_subset_exactly_raises():
    sets = problem_of("sets")
    game = fs.Game(None, games.LinearCost(0.1), np.ones(3), 5.0)
    with pytest.raises(fs.InvalidInput, match="one sample of each of 2 sets"):
        fs.solve(sets, fs.IncentFedAvg(game, 0.1, 1.0), rounds=1)
    sparse = problem_of("sparse")
    most = fs.Game(None, games.LinearCost(0.1), np.ones(3), np.asarray([11.0, 9.0, 9.0]))
    with pytest.raises(fs.InvalidInput, match="Client 0 has 10 samples"):
        fs.solve(sparse, fs.IncentFedAvg(most, 0.1, 1.0), rounds=1)


def test_one_value_for_a_client_is_its_only_sample():
    problem = fs.Problem(
        lambda w, data: jnp.sum((data["y"] - w) ** 2), {"y": np.arange(3.0)}, np.zeros(1)
    )
    own = client(problem, 2)
    assert counts(problem.samples).tolist() == [1, 1, 1]
    assert own.restricted(1, jax.random.key(0)).objective(jnp.ones(1)) == 1
    few = fs.Problem(problem.given[0], problem.samples.values, np.zeros(1), batch_size=4)
    assert client(few, 2).objective(jnp.ones(1)) == 1


def test_passes_over_sparse_clients_use_every_row_with_its_label():
    """A pass of minibatches of 3 over 10 samples, against the dense problem's."""
    matrix, labels = sparse_rows(28)
    found = []
    for problem in (
        problem_of("sparse", batch_size=3),
        fs.problems.logistic_regression(matrix.toarray(), labels, 3, seed=3, batch_size=3),
    ):
        algorithm = fs.FedAvg(0.5, local_epochs=2)
        found.append(fs.solve(problem, algorithm, rounds=3, precision="float64").params)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
def test_large_subsets_are_computed_in_parts(masked):
    """Of 150 rows: the gradient is that of the chosen rows alone, for any number of them."""
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((2, 150, 4)), "y": rng.standard_normal((2, 150))}
    if masked:
        data["mask"] = np.arange(150) < np.array([[150], [140]])
    problem = fs.Problem(lambda w, d: jnp.mean((d["x"] @ w - d["y"]) ** 2), data, np.zeros(4))
    own, key = client(problem, 1), jax.random.key(3)
    slopes = jax.jit(jax.vmap(lambda count: own.restricted(count, key).grad(W)))
    sizes = np.array([1, 63, 64, 65, 100, 128, 129, 140])
    for size, slope in zip(sizes, slopes(jnp.asarray(sizes)), strict=True):
        subset = own.restricted(int(size), key)
        assert subset._has_parts
        rows = np.asarray(own._samples.subset(key, int(size)).order)[:size]
        assert len(set(rows)) == size
        x, y = data["x"][1][rows], data["y"][1][rows]
        exact = 2 * x.T @ (x @ np.asarray(W) - y) / size
        np.testing.assert_allclose(slope, exact, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(subset.grad(W), exact, rtol=2e-5, atol=1e-6)
        value = float(subset.objective(W))
        np.testing.assert_allclose(value, np.mean((x @ np.asarray(W) - y) ** 2), rtol=1e-5)


def test_time_of_a_subset_is_that_of_its_parts():
    """The loop over parts ends after the real rows: 65 of 640 rows are two parts, not ten."""
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((1, 640, 3)), "y": rng.standard_normal((1, 640))}
    problem = fs.Problem(lambda w, d: jnp.mean((d["x"] @ w - d["y"]) ** 2), data, np.zeros(3))
    samples = client(problem, 0)._samples.subset(jax.random.key(0), 65).gathered()
    beyond = jnp.arange(640)[:, None] >= 128
    poisoned = eqx.tree_at(
        lambda s: s.values["x"], samples, jnp.where(beyond, jnp.nan, samples.values["x"])
    )
    w = jnp.ones(3)
    slopes = [problem.objective.slope_by_parts(lambda w: w, w, s) for s in (samples, poisoned)]
    np.testing.assert_array_equal(*slopes)
