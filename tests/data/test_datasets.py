"""Data sets: found on disk, downloaded and checked, or an error in one sentence."""

import dataclasses
import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.data import datasets
from fedsolve.data.download import fingerprint
from tests.support.examples import DATA, needs_data


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder; files named `half-…` break off in the middle."""

    def log_message(self, *_):
        pass

    def copyfile(self, source, outputfile):
        raw = source.read()
        outputfile.write(raw[: len(raw) // 2] if "half-" in self.path else raw)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A public home on this machine: a folder to fill, and what makes it a set's source."""
    folder = tmp_path / "home"
    folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.delenv("FEDSOLVE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def serve(name, files, prefix="", md5=None, **changes):
        sources = []
        for known, (path, raw) in zip(datasets.SOURCES[name].files, files.items(), strict=True):
            (folder / (prefix + path)).write_bytes(raw)
            url = f"http://127.0.0.1:{server.server_port}/{prefix}{path}"
            sources.append(datasets.File(url, known.md5 if md5 is None else md5(raw)))
        changed = dataclasses.replace(datasets.SOURCES[name], files=tuple(sources), **changes)
        monkeypatch.setitem(datasets.SOURCES, name, changed)

    yield serve
    server.shutdown()
    server.server_close()
    thread.join()


def md5(raw):
    return hashlib.md5(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).hexdigest()


def plain_md5(raw):
    return hashlib.md5(raw).hexdigest()


def idx(values):
    shape = np.asarray(values.shape, ">i4").tobytes()
    return gzip.compress(bytes([0, 0, 8, values.ndim]) + shape + values.tobytes(), 1)


def small_mnist(rng):
    images = [rng.integers(0, 256, (n, 28, 28), np.uint8) for n in (6, 4)]
    digits = [rng.integers(0, 10, n, np.uint8) for n in (6, 4)]
    values = (images[0], digits[0], images[1], digits[1])
    return values, {f"part-{i}.gz": idx(v) for i, v in enumerate(values)}


def archive(members):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return raw.getvalue()


def left_over(tmp_path):
    return [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_a_download_is_kept_and_found_again(home, tmp_path):
    values, files = small_mnist(np.random.default_rng(0))
    home("mnist", files, md5=md5)
    first = fs.datasets.load("mnist")
    for got, expected in zip(
        (first.train["x"], first.train["y"], first.test["x"], first.test["y"]), values, strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    (kept,) = left_over(tmp_path)
    assert kept == tmp_path / "cache/fedsolve/data/mnist/mnist.npz"
    for path in (tmp_path / "home").iterdir():
        path.unlink()
    again = fs.datasets.load("mnist")
    np.testing.assert_array_equal(again.train["x"], first.train["x"])


def test_a_wrong_checksum_is_refused_and_leaves_nothing(home, tmp_path):
    _, files = small_mnist(np.random.default_rng(0))
    home("mnist", files)  # the checksums of the real files
    with pytest.raises(fs.InvalidInput, match=r"has the checksum [0-9a-f]{32}, not 6bbc9ace"):
        fs.datasets.load("mnist")
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("name", ["mnist", "adult"])
def test_half_a_download_leaves_nothing(home, tmp_path, name):
    files = {"a": b"x" * 5000, "b": b"y" * 5000}
    if name == "mnist":
        _, files = small_mnist(np.random.default_rng(0))
    home(name, files, prefix="half-", md5=md5)
    with pytest.raises(fs.InvalidInput, match=r"cannot be downloaded|has the checksum"):
        fs.datasets.load(name)
    assert left_over(tmp_path) == []


def test_changed_contents_are_refused(home, tmp_path):
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as members:
        members.writestr("qsar_oral_toxicity.csv", ";".join("0110" * 256) + ";positive\n")
    home("qsar_oral_toxicity", {"toxicity.zip": raw.getvalue()})
    with pytest.raises(fs.InvalidInput, match="differs from the known version"):
        fs.datasets.load("qsar_oral_toxicity")
    assert left_over(tmp_path) == []
    home("qsar_oral_toxicity", {"toxicity.zip": raw.getvalue()}, contents=None)
    data = fs.datasets.load("qsar_oral_toxicity")
    np.testing.assert_array_equal(data.train["x"], np.tile([[0, 1, 1, 0]], 256))
    assert data.train["y"].tolist() == [1]
    assert data.test == {}


def test_cifar10_from_its_records(home):
    rng = np.random.default_rng(1)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    records = {name: rng.integers(0, 256, (2, 3073), np.uint8) for name in names}
    members = {f"cifar-10-batches-bin/{k}": v.tobytes() for k, v in records.items()}
    members["cifar-10-batches-bin/batches.meta.txt"] = b"\n".join(b"class%d" % i for i in range(10))
    home("cifar10", {"cifar.tar.gz": archive(members)}, md5=plain_md5)
    data = fs.datasets.load("cifar10")
    assert data.train["x"].shape == (10, 32, 32, 3)
    last = records["data_batch_5.bin"][1]
    assert data.train["y"][9] == last[0]
    for row, column, color in [(0, 0, 0), (3, 7, 1), (31, 30, 2)]:
        assert data.train["x"][9, row, column, color] == last[1 + 1024 * color + 32 * row + column]
    np.testing.assert_array_equal(data.test["y"], records["test_batch.bin"][:, 0])
    assert data.names["y"][3] == "class3"


def test_food101_from_its_pictures(home):
    from PIL import Image

    def jpeg(color):
        raw = io.BytesIO()
        Image.new("RGB", (90, 120), color).save(raw, "JPEG", quality=95)
        return raw.getvalue()

    members = {
        "food-101/images/waffles/1.jpg": jpeg((250, 0, 0)),
        "food-101/images/apple_pie/7.jpg": jpeg((0, 0, 250)),
        "food-101/images/waffles/2.jpg": jpeg((0, 250, 0)),
        "food-101/meta/classes.txt": b"apple_pie\nwaffles\n",
        "food-101/meta/train.txt": b"apple_pie/7\nwaffles/1\n",
        "food-101/meta/test.txt": b"waffles/2\n",
    }
    home("food101", {"food.tar.gz": archive(members)}, md5=plain_md5)
    data = fs.datasets.load("food101")
    assert data.train["x"].shape == (2, 64, 64, 3)
    assert data.train["y"].tolist() == [0, 1]
    assert data.test["y"].tolist() == [1]
    np.testing.assert_allclose(data.train["x"][0].mean(axis=(0, 1)), [0, 0, 250], atol=6)
    np.testing.assert_allclose(data.test["x"][0].mean(axis=(0, 1)), [0, 250, 0], atol=6)

    problem = fs.problems.images("food101", hidden=4, clients=1, batch_size=1, augment=True)
    assert problem.size == (64 * 64 * 3 + 1) * 4 + 5 * 2  # as many scores as there are classes
    assert fs.solve(problem, fs.FedAvg(0.01), rounds=1).history["test_accuracy"][0] in (0, 1)
    few = fs.problems.images("food101", hidden=4, clients=1, samples=1)
    assert few.samples.values["y"].shape == (1, 1)

    del members["food-101/images/waffles/2.jpg"]
    home("food101", {"less.tar.gz": archive(members)}, md5=plain_md5)
    (datasets.cache() / "food101/food101.npz").unlink()
    with pytest.raises(fs.InvalidInput, match=r"1 pictures are missing, such as images/waffles/2"):
        fs.datasets.load("food101")


def test_unreachable_servers_and_unknown_names_raise(home, tmp_path, monkeypatch):
    with pytest.raises(fs.InvalidInput, match=r"no data set 'minst'; there are mnist, cifar10"):
        fs.datasets.load("minst")
    home("adult", {"adult.data": b"", "adult.test": b""})
    (tmp_path / "home/adult.data").unlink()
    with pytest.raises(fs.InvalidInput, match=r"(?s)not on this machine.*File not found.*FEDSOLVE"):
        fs.datasets.load("adult")
    nowhere = (datasets.File("http://127.0.0.1:9/adult.data", None),)
    monkeypatch.setitem(
        datasets.SOURCES, "adult", dataclasses.replace(datasets.SOURCES["adult"], files=nowhere)
    )
    with pytest.raises(fs.InvalidInput, match=r"(?s)not on this machine.*refused.*FEDSOLVE_DATA"):
        fs.datasets.load("adult")
    monkeypatch.setenv("FEDSOLVE_DATA", str(tmp_path / "own"))
    (tmp_path / "own/adult").mkdir(parents=True)
    (tmp_path / "own/adult/adult.npz").write_bytes(b"no npz")
    with pytest.raises(fs.InvalidInput, match=r"adult\.npz is not the data set adult"):
        fs.datasets.load("adult")


# The real ones


@needs_data("adult")
def test_adult_from_the_census_files(home, tmp_path):
    """The original files, with their published checksums, become what is on disk."""
    files = {
        f"adult.{part}": gzip.decompress((DATA / f"adult/adult.{part}.gz").read_bytes())
        for part in ("data", "test")
    }
    home("adult", files)
    data = fs.datasets.load("adult")
    (made,) = left_over(tmp_path)
    with np.load(made) as got, np.load(DATA / "adult/adult.npz") as expected:
        assert set(got.files) == set(expected.files)
        for name in got.files:
            assert got[name].dtype == expected[name].dtype
            np.testing.assert_array_equal(got[name], expected[name], err_msg=name)
    assert len(data.train["age"]) + len(data.test["age"]) == 48_842
    assert data.names["sex"] == ["Female", "Male"]
    assert data.names["workclass"][0] == "?"


@needs_data("mnist")
def test_mnist_from_its_files(home, monkeypatch):
    """The digits written back into the original format have the published checksums."""
    with np.load(DATA / "mnist/mnist.npz") as arrays:
        test = [arrays["x_test"], arrays["y_test"]]
    known = [datasets.SOURCES["mnist"].files[i].md5 for i in (2, 3)]
    assert [md5(idx(values)) for values in test] == known
    monkeypatch.setenv("FEDSOLVE_DATA", str(DATA))
    data = fs.datasets.load("mnist")
    assert data.train["x"].shape == (60_000, 28, 28)
    assert np.bincount(data.train["y"])[:3].tolist() == [5923, 6742, 5958]


@needs_data("qsar_oral_toxicity")
def test_toxicity_has_its_known_contents(monkeypatch):
    with np.load(DATA / "qsar_oral_toxicity/qsar_oral_toxicity.npz") as arrays:
        found = fingerprint({name: arrays[name] for name in arrays.files})
    assert found == datasets.SOURCES["qsar_oral_toxicity"].contents
    monkeypatch.setenv("FEDSOLVE_DATA", str(DATA))
    data = fs.datasets.load("qsar_oral_toxicity")
    assert data.train["x"].shape == (8992, 1024)
    assert data.train["x"].mean() == pytest.approx(0.0931, abs=5e-5)
    assert data.train["y"].sum() == 741


def test_what_was_made_once_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def make():
        calls.append(1)
        return {"rows": np.arange(3.0)}

    for _ in range(2):
        np.testing.assert_array_equal(fs.datasets.kept("rows", make)["rows"], [0, 1, 2])
    assert len(calls) == 1
    (file,) = tmp_path.rglob("rows.npz")
    file.write_bytes(b"damaged")
    np.testing.assert_array_equal(fs.datasets.kept("rows", make)["rows"], [0, 1, 2])
    assert len(calls) == 2
