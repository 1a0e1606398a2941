"""Data sets by name.

`load("mnist")` looks for `mnist/mnist.npz` in the folder named by `FEDSOLVE_DATA`, then in the
cache (`$XDG_CACHE_HOME/fedsolve/data`, by default `~/.cache/fedsolve/data`), and then takes the
original files from their public home, checks them against their published checksums, and puts the
same `mnist.npz` into the cache. Nothing is left of a download that fails.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedsolve.errors import InvalidInput

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, repr=False)
class Dataset:
    """Arrays by name, one row a sample: `train`, `test` (empty where the data have no such part),
    and `names`, what the codes in an array stand for."""

    train: Arrays
    test: Arrays
    names: dict[str, list[str]]

    def __repr__(self) -> str:
        def shown(arrays: Arrays) -> str:
            return ", ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in arrays.items()) or "none"

        return f"Dataset(train: {shown(self.train)}; test: {shown(self.test)})"


@dataclasses.dataclass(frozen=True)
class File:
    """An original file at its public home. The md5 is of what it holds unpacked if it ends in
    `.gz`, of the file itself otherwise (an archive, too); None where none is published."""

    url: str
    md5: str | None


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a data set comes from and how it becomes arrays.

    - `parse(paths of the files)`: the arrays of the npz file.
    - `present(arrays of the npz file)`: what `load` gives.
    - `contents`: sha256 of the arrays, for data without a published checksum.
    """

    files: tuple[File, ...]
    parse: Callable[..., Arrays]
    present: Callable[[Any], Dataset]
    contents: str | None = None


def load(name: str) -> Dataset:
    """A data set: `"mnist"`, `"cifar10"`, `"adult"`, `"qsar_oral_toxicity"` or `"food101"`.

    | name | arrays |
    |---|---|
    | `mnist` | `x` 28×28, 0 to 255; `y` the digit |
    | `cifar10` | `x` 32×32×3, 0 to 255; `y`, ten classes |
    | `adult` | the 14 columns of the census, codes for words; `income`: 1 above 50,000 |
    | `qsar_oral_toxicity` | `x` 1024 bits; `y`: 1 for toxic; there is no test part |
    | `food101` | `x` 64×64×3 (the middle of the picture, scaled), 0 to 255; `y`, 101 classes |
    """
    if name not in SOURCES:
        raise InvalidInput(f"There is no data set {name!r}; there are {', '.join(SOURCES)}.")
    places = [cache() / name / f"{name}.npz"]
    if "FEDSOLVE_DATA" in os.environ:
        places.insert(0, Path(os.environ["FEDSOLVE_DATA"], name, f"{name}.npz"))
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        path = places[-1]
        _fetch(name, path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return SOURCES[name].present(arrays)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{path} is not the data set {name}: {error}.") from error


def cache() -> Path:
    """Where downloaded data are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "fedsolve", "data")


def kept(name: str, make: Callable[[], Arrays]) -> Arrays:
    """What `make` gives; from the cache, where it was once made and put there."""
    path = cache().with_name("made") / f"{name}.npz"
    damaged = contextlib.suppress(OSError, ValueError, EOFError, zipfile.BadZipFile)
    with damaged, np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
    found = make()
    with contextlib.suppress(OSError):  # no place for it: made anew every time
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as folder:
            whole = Path(folder, path.name)
            np.savez(whole, **found)  # type: ignore[arg-type]
            os.replace(whole, path)
    return found


def _fetch(name: str, path: Path) -> None:
    """Downloads, checks and converts; the file appears at `path` whole, or not at all."""
    source = SOURCES[name]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=".download-", dir=path.parent)
    except OSError as error:
        raise InvalidInput(f"Cannot keep {name} in {path.parent}: {error.strerror}.") from error
    try:
        files = [_download(name, file, Path(folder)) for file in source.files]
        arrays = source.parse(*files)
        if source.contents is not None and _fingerprint(arrays) != source.contents:
            raise InvalidInput(
                f"The data set {name} from {source.files[0].url} has changed: it is not the one "
                "that is known, so it was not kept."
            )
        whole = Path(folder, path.name)
        np.savez_compressed(whole, **arrays)  # type: ignore[arg-type]
        os.replace(whole, path)
    except (tarfile.TarError, zipfile.BadZipFile, ValueError, KeyError, StopIteration) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"The files of {name} are not what they should be: {error}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # only if nothing is in it


def _download(name: str, file: File, folder: Path) -> Path:
    """The file's contents (unpacked if it ends in `.gz`, unless it is an archive), checked."""
    import urllib.request  # slow to import, and rarely needed

    packed = file.url.endswith(".gz") and not file.url.endswith(".tar.gz")
    target = folder / file.url.rsplit("/", 1)[1].removesuffix(".gz" if packed else "\0")
    try:
        with urllib.request.urlopen(file.url, timeout=60) as answer, open(target, "wb") as out:
            stream: BinaryIO = gzip.GzipFile(fileobj=answer) if packed else answer  # type: ignore
            digest = hashlib.md5(usedforsecurity=False)
            while block := stream.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (OSError, EOFError) as error:  # among them urllib's URLError and timeouts
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise InvalidInput(
            f"The data set {name} is not on this machine, and {file.url} cannot be had ({reason}). "
            f"Put {name}.npz into a folder {name}, and name the folder above it in FEDSOLVE_DATA."
        ) from error
    if file.md5 is not None and digest.hexdigest() != file.md5:
        raise InvalidInput(
            f"{file.url} has the checksum {digest.hexdigest()}, not {file.md5}: "
            "it is damaged or has changed, so it was not kept."
        )
    return target


def _fingerprint(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


# MNIST: four idx files


def _mnist(*paths: Path) -> Arrays:
    names = ("x_train", "y_train", "x_test", "y_test")
    return {name: _idx(path) for name, path in zip(names, paths, strict=True)}


def _idx(path: Path) -> np.ndarray:
    """An idx file: two zeros, a type (8: bytes), the number of axes, their sizes, the values."""
    raw = path.read_bytes()
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is no idx file of bytes")
    shape = np.frombuffer(raw, ">i4", raw[3], 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def _images(arrays: Any) -> Dataset:
    train, test = ({k: arrays[f"{k}_{part}"] for k in ("x", "y")} for part in ("train", "test"))
    names = arrays["class_names"] if "class_names" in arrays else range(10)
    return Dataset(train, test, {"y": list(map(str, names))})


# CIFAR-10: an archive of records, one byte for the class and 3 × 1024 for the colours


def _cifar10(archive: Path) -> Arrays:
    batches = [f"data_batch_{i}.bin" for i in range(1, 6)]
    with tarfile.open(archive) as members:
        found = {Path(m.name).name: m for m in members if m.isfile()}

        def read(name: str) -> bytes:
            return _opened(members, found[name]).read()

        train = np.frombuffer(b"".join(map(read, batches)), np.uint8).reshape(-1, 3073)
        test = np.frombuffer(read("test_batch.bin"), np.uint8).reshape(-1, 3073)
        names = read("batches.meta.txt").decode().split()
    arrays: Arrays = {"class_names": np.asarray(names)}
    for part, rows in {"train": train, "test": test}.items():
        arrays[f"y_{part}"] = rows[:, 0].copy()
        pictures = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[f"x_{part}"] = np.ascontiguousarray(pictures)
    return arrays


def _opened(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Any:
    opened = archive.extractfile(member)
    if opened is None:
        raise ValueError(f"{member.name} is not a file")
    return opened


# Adult: comma-separated words and numbers

NUMERIC = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)


def _adult(train: Path, test: Path) -> Arrays:
    def rows(path: Path) -> list[list[str]]:
        lines = csv.reader(io.StringIO(path.read_text("ascii")), skipinitialspace=True)
        return [line for line in lines if len(line) == len(COLUMNS)]

    columns = {
        part: dict(zip(COLUMNS, zip(*rows(path), strict=True), strict=True))
        for part, path in {"train": train, "test": test}.items()
    }
    columns["test"]["income"] = tuple(word.rstrip(".") for word in columns["test"]["income"])
    arrays: Arrays = {}
    for name in COLUMNS:
        if name in NUMERIC:
            for part in columns:
                arrays[f"{part}_{name}"] = np.asarray(columns[part][name]).astype(np.int32)
        else:
            words = np.unique(columns["train"][name] + columns["test"][name])
            arrays[f"cats_{name}"] = words
            for part in columns:
                codes = np.searchsorted(words, np.asarray(columns[part][name]))
                arrays[f"{part}_{name}"] = codes.astype(np.uint8)
    return arrays


def _census(arrays: Any) -> Dataset:
    train, test = ({c: arrays[f"{part}_{c}"] for c in COLUMNS} for part in ("train", "test"))
    words = {c: arrays[f"cats_{c}"].tolist() for c in COLUMNS if c not in NUMERIC}
    return Dataset(train, test, words)


# QSAR oral toxicity: an archive with one file of bits and a word, separated by semicolons


def _qsar(archive: Path) -> Arrays:
    with zipfile.ZipFile(archive) as members:
        name = next(n for n in members.namelist() if n.endswith(".csv"))
        lines = members.read(name).decode("ascii").split()
    rows = [line.split(";") for line in lines]
    bits = np.asarray([row[:-1] for row in rows]).astype(np.uint8)
    toxic = np.asarray([row[-1] == "positive" for row in rows])
    return {"X_packed": np.packbits(bits, axis=1), "y": toxic.astype(np.uint8)}


def _bits(arrays: Any) -> Dataset:
    train = {"x": np.unpackbits(arrays["X_packed"], axis=1), "y": arrays["y"]}
    return Dataset(train, {}, {"y": ["negative", "positive"]})


# Food-101: an archive of JPEG pictures and lists of them

SIDE = 64  # 101,000 pictures of this side are 1.2 GB


def _food101(archive: Path) -> Arrays:
    from PIL import Image, ImageOps

    with tarfile.open(archive) as members:
        found = {m.name.split("/", 1)[-1]: m for m in members if m.isfile()}

        def lines(name: str) -> list[str]:
            return _opened(members, found[name]).read().decode().split()

        names = lines("meta/classes.txt")
        listed = {part: lines(f"meta/{part}.txt") for part in ("train", "test")}
        place = {
            f"images/{key}.jpg": (part, row)
            for part, keys in listed.items()
            for row, key in enumerate(keys)
        }
        arrays: Arrays = {"class_names": np.asarray(names)}
        for part, keys in listed.items():
            arrays[f"x_{part}"] = np.zeros((len(keys), SIDE, SIDE, 3), np.uint8)
            codes = [names.index(key.split("/")[0]) for key in keys]
            arrays[f"y_{part}"] = np.asarray(codes, np.uint8)
        for name, member in found.items():  # in the archive's order: it is read once
            if name in place:
                part, row = place.pop(name)
                with Image.open(_opened(members, member)) as picture:
                    square = ImageOps.fit(picture.convert("RGB"), (SIDE, SIDE))
                arrays[f"x_{part}"][row] = np.asarray(square)
    if place:
        raise ValueError(f"{len(place)} pictures are missing, such as {next(iter(place))}")
    return arrays


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
SOURCES: dict[str, Source] = {
    "mnist": Source(
        (
            File(_MNIST + "train-images-idx3-ubyte.gz", "6bbc9ace898e44ae57da46a324031adb"),
            File(_MNIST + "train-labels-idx1-ubyte.gz", "a25bea736e30d166cdddb491f175f624"),
            File(_MNIST + "t10k-images-idx3-ubyte.gz", "2646ac647ad5339dbf082846283269ea"),
            File(_MNIST + "t10k-labels-idx1-ubyte.gz", "27ae3e4e09519cfbb04c329615203637"),
        ),
        _mnist,
        _images,
    ),
    "cifar10": Source(
        (
            File(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",  # no pickles in this one
                "c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        _cifar10,
        _images,
    ),
    "adult": Source(
        (
            File(_UCI + "adult/adult.data", "5d7c39d7b8804f071cdd1f2a7c460872"),
            File(_UCI + "adult/adult.test", "35238206dfdf7f1fe215bbb874adecdc"),
        ),
        _adult,
        _census,
    ),
    "qsar_oral_toxicity": Source(
        (File(_UCI + "00508/qsar_oral_toxicity.zip", None),),
        _qsar,
        _bits,
        contents="5d174d7a057da444ff23b14339ede98e447b3d347e1511e879942e39bf2f5d84",
    ),
    "food101": Source(
        (
            File(
                "http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
                "85eeb15f3717b99a5da872d97d918f87",
            ),
        ),
        _food101,
        _images,
    ),
}
