"""Readers of the original files of each data set.

Each data set has two functions here: one that parses the original files into the arrays of the
cached npz file, and one that presents those arrays as a `Dataset`.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, repr=False)
class Dataset:
    """The arrays of a data set, by name, with one row for each sample.

    Args:
        train: The training part.
        test: The test part; empty if the data set has none.
        names: For each array of codes, the words that the codes 0, 1, 2, … stand for.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> train = {"x": np.zeros((3, 2)), "y": np.array([0, 1, 1])}
        >>> fs.datasets.Dataset(train, {}, {"y": ["cat", "dog"]})
        Dataset(train: x float64[3, 2], y int64[3]; test: none)
    """

    train: Arrays
    test: Arrays
    names: dict[str, list[str]]

    def __repr__(self) -> str:
        """Return names, types and shapes of the arrays, without their values."""

        def shown(arrays: Arrays) -> str:
            return ", ".join(f"{k} {v.dtype}{list(v.shape)}" for k, v in arrays.items()) or "none"

        return f"Dataset(train: {shown(self.train)}; test: {shown(self.test)})"


# MNIST: four idx files


def read_mnist(*paths: Path) -> Arrays:
    """Read images and labels of both parts from four idx files."""
    names = ("x_train", "y_train", "x_test", "y_test")
    return {name: _read_idx(path) for name, path in zip(names, paths, strict=True)}


def _read_idx(path: Path) -> np.ndarray:
    """Read an idx file: two zeros, a type (8: bytes), the number of axes, their sizes, values."""
    raw = path.read_bytes()
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is not an idx file of bytes")
    shape = np.frombuffer(raw, ">i4", raw[3], 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def present_images(arrays: Mapping[str, np.ndarray]) -> Dataset:
    """Present images `x` and classes `y`; the classes are digits unless they have names."""
    train, test = ({k: arrays[f"{k}_{part}"] for k in ("x", "y")} for part in ("train", "test"))
    names = arrays["class_names"] if "class_names" in arrays else range(10)
    return Dataset(train, test, {"y": list(map(str, names))})


# CIFAR-10: an archive of records, one byte for the class and 3 × 1024 for the colours


def read_cifar10(archive: Path) -> Arrays:
    """Read images, classes and class names from the archive of binary records."""
    batches = [f"data_batch_{i}.bin" for i in range(1, 6)]
    with tarfile.open(archive) as members:
        found = {Path(m.name).name: m for m in members if m.isfile()}

        def read(name: str) -> bytes:
            return _read_member(members, found[name])

        train = np.frombuffer(b"".join(map(read, batches)), np.uint8).reshape(-1, 3073)
        test = np.frombuffer(read("test_batch.bin"), np.uint8).reshape(-1, 3073)
        names = read("batches.meta.txt").decode().split()
    arrays: Arrays = {"class_names": np.asarray(names)}
    for part, rows in {"train": train, "test": test}.items():
        arrays[f"y_{part}"] = rows[:, 0].copy()
        pictures = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[f"x_{part}"] = np.ascontiguousarray(pictures)
    return arrays


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Read a member of an archive; raise if it is a folder or a link."""
    opened = archive.extractfile(member)
    if opened is None:
        raise ValueError(f"{member.name} is not a file")
    return opened.read()


# Adult: comma-separated words and numbers

NUMERIC = ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week")
COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)


def read_adult(train: Path, test: Path) -> Arrays:
    """Read the 15 columns of both parts: numbers as they are, words as codes."""

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


def present_adult(arrays: Mapping[str, np.ndarray]) -> Dataset:
    """Present the columns by name, with the words of those that are codes."""
    train, test = ({c: arrays[f"{part}_{c}"] for c in COLUMNS} for part in ("train", "test"))
    words = {c: arrays[f"cats_{c}"].tolist() for c in COLUMNS if c not in NUMERIC}
    return Dataset(train, test, words)


# QSAR oral toxicity: an archive with one file of bits and a word, separated by semicolons


def read_qsar(archive: Path) -> Arrays:
    """Read the molecules' 1024 bits, packed into bytes, and whether each is toxic."""
    with zipfile.ZipFile(archive) as members:
        name = next(n for n in members.namelist() if n.endswith(".csv"))
        lines = members.read(name).decode("ascii").split()
    rows = [line.split(";") for line in lines]
    bits = np.asarray([row[:-1] for row in rows]).astype(np.uint8)
    toxic = np.asarray([row[-1] == "positive" for row in rows])
    return {"X_packed": np.packbits(bits, axis=1), "y": toxic.astype(np.uint8)}


def present_qsar(arrays: Mapping[str, np.ndarray]) -> Dataset:
    """Present the molecules as rows of single bits."""
    train = {"x": np.unpackbits(arrays["X_packed"], axis=1), "y": arrays["y"]}
    return Dataset(train, {}, {"y": ["negative", "positive"]})


# Food-101: an archive of JPEG pictures and lists of them

SIDE = 64  # 101,000 pictures of this side are 1.2 GB


def read_food101(archive: Path) -> Arrays:
    """Read the pictures that the archive lists, cropped to a square and scaled to `SIDE` pixels."""
    from PIL import Image, ImageOps

    with tarfile.open(archive) as members:
        found = {m.name.split("/", 1)[-1]: m for m in members if m.isfile()}

        def lines(name: str) -> list[str]:
            return _read_member(members, found[name]).decode().split()

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
                with Image.open(io.BytesIO(_read_member(members, member))) as picture:
                    square = ImageOps.fit(picture.convert("RGB"), (SIDE, SIDE))
                arrays[f"x_{part}"][row] = np.asarray(square)
    if place:
        raise ValueError(f"{len(place)} pictures are missing, such as {next(iter(place))}")
    return arrays


# Fed-TCGA-BRCA: the patients, their division, and the region of every hospital

CLINICAL = 39  # columns of a patient between the name and the event


def read_tcga_brca(patients: Path, division: Path, hospitals: Path) -> Arrays:
    """Read the patients of FLamby's division, in the order of their file."""

    def rows(path: Path) -> list[list[str]]:
        return list(csv.reader(io.StringIO(path.read_text("utf-8"))))[1:]

    place = {name: part.split("_") for name, _, part in rows(division)}
    regions = {line[0]: line[4] for line in rows(hospitals)}
    kept = [line for line in rows(patients) if line[0] in place]
    if len(kept) != len(place) or any(len(line) != CLINICAL + 3 for line in kept):
        raise ValueError("the patients are not those of the division")
    numbers = np.asarray([line[1:] for line in kept]).astype(np.float32)
    region = np.asarray([int(place[line[0]][1]) for line in kept], np.uint8)
    names = dict(zip(region, [regions[line[0].split("-")[1]] for line in kept], strict=True))
    return {
        "x": numbers[:, :CLINICAL],
        "event": numbers[:, CLINICAL].astype(np.int8),
        "time": numbers[:, CLINICAL + 1],
        "region": region,
        "in_test": np.asarray([place[line[0]][0] == "test" for line in kept]),
        "region_names": np.asarray([names[code] for code in sorted(names)]),
    }


def present_tcga_brca(arrays: Mapping[str, np.ndarray]) -> Dataset:
    """Present both parts, with the names of the regions."""
    columns = {name: arrays[name] for name in ("x", "event", "time", "region")}
    train, test = (
        {name: values[arrays["in_test"] == part] for name, values in columns.items()}
        for part in (False, True)
    )
    return Dataset(train, test, {"region": arrays["region_names"].tolist()})
