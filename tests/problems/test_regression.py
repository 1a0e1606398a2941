"""FedADMM's problems: Example 5.1 as written, Example 5.2 dense and sparse."""

import bz2

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.runtimes.evaluation import client_values
from tests.support import examples

CSR = pytest.importorskip("scipy.sparse").csr_matrix


def test_example_5_1_is_as_written():
    """⌈d/3⌉ samples are normal, ⌈d/3⌉ Student-t(5), the others uniform in [−5, 5]; told apart by
    their second moments, 1, 5/3 and 25/3."""
    problem = fs.problems.linear_regression(clients=4, size=4000, seed=3)
    data, mask = jax.tree.map(np.asarray, problem.samples.values), problem.samples.mask
    sizes = mask.sum(axis=1)
    assert ((sizes >= 50) & (sizes <= 150)).all()
    assert len(set(sizes)) > 1
    moments = np.mean(data["inputs"][mask] ** 2, axis=1)
    third = -(-int(sizes.sum()) // 3)
    kinds = np.digitize(moments, [1.25, 5.0])
    assert np.bincount(kinds).tolist() == [third, third, sizes.sum() - 2 * third]
    assert np.abs(data["targets"][mask][kinds == 2]).max() > 3  # b is from the same distribution
    of_first = kinds[: sizes[0]]
    assert set(of_first) == {0, 1, 2}  # mixed


def test_linear_regression_ignores_padding():
    problem = fs.problems.linear_regression(clients=3, size=5, smallest=4, largest=9)
    data, w = jax.tree.map(np.asarray, problem.samples.values), np.linspace(-1, 1, 5)
    found = client_values(problem.on_device(), jnp.asarray(w, jnp.float32))["objective"]
    for a, b, mask, value in zip(
        data["inputs"], data["targets"], problem.samples.mask, found, strict=True
    ):
        expected = 0.5 * np.mean((a[mask] @ w - b[mask]) ** 2)
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_large_data_are_not_copied():
    problem = fs.problems.linear_regression(clients=3, size=5)
    inputs = problem.samples.values["inputs"]
    placed = problem.on_device().samples.values["inputs"]
    assert np.asarray(placed).ctypes.data == np.asarray(inputs).ctypes.data


@pytest.fixture(scope="module")
def rows():
    """20 sparse rows, one of them long and one empty."""
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((20, 30)) * (rng.random((20, 30)) < 0.15)
    dense[3], dense[7] = rng.standard_normal(30), 0
    return CSR(dense.astype(np.float32)), (rng.random(20) < 0.5).astype(np.float32)


@pytest.mark.parametrize("width", [4, 64])
def test_sparse_clients_are_the_dense_ones(rows, width):
    matrix, labels = rows
    w = np.random.default_rng(1).standard_normal(30)
    found = {}
    with jax.enable_x64(True):
        for name, problem in {
            "dense": fs.problems.logistic_regression(matrix.toarray(), labels, 6, seed=2),
            "sparse": fs.problems.sparse_regression(matrix, labels, 6, seed=2, width=width),
        }.items():
            placed = problem.on_device(np.float64)
            found[name] = client_values(placed, jnp.asarray(w), gradient=True)
    for name in ("objective", "gradient"):
        np.testing.assert_allclose(found["sparse"][name], found["dense"][name], rtol=1e-10)
    parts = np.array_split(np.random.default_rng(2).permutation(20), 6)
    margin, y = matrix[parts[0]] @ w, labels[parts[0]]
    expected = np.mean(np.logaddexp(0, margin) - y * margin) + 0.0005 * w @ w
    np.testing.assert_allclose(found["dense"]["objective"][0], expected, rtol=1e-6)


def test_fedadmm_on_sparse_clients(rows):
    matrix, labels = rows
    algorithm = fs.FedADMM(participants=3, local_iterations=4)
    options = {"rounds": 5, "precision": "float64"}
    one = fs.solve(fs.problems.sparse_regression(matrix, labels, 6), algorithm, **options)
    other = fs.solve(
        fs.problems.logistic_regression(matrix.toarray(), labels, 6), algorithm, **options
    )
    np.testing.assert_allclose(one.params, other.params, rtol=1e-7, atol=1e-10)


def test_generated_data_have_real_sim_s_density_and_stay_sparse():
    matrix, labels = fs.problems.like_real_sim(samples=3000)
    assert matrix.shape == (3000, 20958)
    assert 45 < matrix.nnz / 3000 < 55
    assert 0.3 < labels.mean() < 0.7
    assert np.diff(matrix.indptr).max() > 200  # a long tail, as texts have
    problem = fs.problems.sparse_regression(matrix, labels, clients=50)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(problem.samples))
    assert held < 4 * 8 * matrix.nnz < 0.05 * 3000 * 20958 * 4


@pytest.mark.parametrize("packed", [False, True])
def test_libsvm_files_plain_and_bz2(tmp_path, packed):
    text = b"+1 1:0.5 7:-2\n-1 2:1 # a note\n-1 7:3e-1\n"
    path = tmp_path / ("data.txt" + ".bz2" * packed)
    path.write_bytes(bz2.compress(text) if packed else text)
    matrix, labels = fs.problems.read_libsvm(path)
    np.testing.assert_array_equal(labels, [1, 0, 0])
    expected = np.zeros((3, 7))
    expected[[0, 0, 1, 2], [0, 6, 1, 6]] = [0.5, -2, 1, 0.3]
    np.testing.assert_allclose(matrix.toarray(), expected, rtol=1e-6)
    problem = fs.problems.sparse_logistic(str(path), clients=2)
    assert (problem.n, problem.size) == (2, 7)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: fs.problems.read_libsvm(path / "no"), "There is no file"),
        (lambda path: fs.problems.read_libsvm(path / "bad"), "not in LIBSVM's format"),
        (lambda path: fs.problems.read_libsvm(path / "unsorted"), "sorted and unique"),
        (lambda path: fs.problems.read_libsvm(path / "repeated"), "sorted and unique"),
        (lambda path: fs.problems.read_libsvm(path / "three"), "two kinds of labels, it has 3"),
        (lambda path: fs.problems.linear_regression(largest=3), "largest must be at least"),
        (lambda path: fs.problems.sparse_logistic(str(path / "two"), 9), "cannot each have one"),
    ],
)
def test_bad_data_raise(tmp_path, make, sentence):
    (tmp_path / "bad").write_text("1 a:b\n")
    (tmp_path / "three").write_text("1 1:1\n2 1:1\n3 1:1\n")
    (tmp_path / "unsorted").write_text("1 3:1 2:1\n2 1:1\n")
    (tmp_path / "repeated").write_text("1 2:1 2:1\n2 1:1\n")
    (tmp_path / "two").write_text("1 1:1\n2 1:1\n")
    with pytest.raises(fs.InvalidInput, match=sentence):
        make(tmp_path)


@examples.needs_data("qsar_oral_toxicity")
def test_example_5_2_on_qsar():
    problem = fs.problems.logistic(clients=50)
    assert (problem.n, problem.size) == (50, 1024)
    assert problem.samples.mask.sum() == 8992
    run = fs.solve(problem, fs.FedADMM(participants=25, local_iterations=10), rounds=10)
    assert run.history["objective"][-1] < np.log(2) / 2
    scaled = fs.problems.logistic(clients=50, unit_columns=True).samples
    rows = np.asarray(scaled.values["inputs"], np.float64)[np.asarray(scaled.mask)]
    squares = (rows**2).sum(axis=0)
    assert np.allclose(squares[squares > 0], 1, rtol=1e-4)
