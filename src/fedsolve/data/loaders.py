"""Loaders of arrays that a site's file may name: npz, safetensors, Parquet, Arrow, image folders.

Those of `BY_CLIENTS` return all clients' arrays, stacked on a leading axis; those of `BY_SAMPLES`
the arrays of one client, with samples on the first axis.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedsolve.data.table_files import arrow_table
from fedsolve.errors import InvalidInput
from fedsolve.types import Table

Arrays = dict[str, np.ndarray]
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


def load_npz(path: Path) -> Arrays:
    """Return the arrays of an npz file, without pickled ones."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def load_safetensors(path: Path) -> Arrays:
    """Return the arrays of a safetensors file."""
    from safetensors.numpy import load_file

    return load_file(path)


def load_arrow(path: Path, options: Table) -> Arrays:
    """Return the columns of Parquet or Arrow files, or of a Hugging Face folder, as arrays.

    A column of lists of one length becomes an array with more axes.
    """
    table = arrow_table(path)
    if table.num_rows == 0:
        raise InvalidInput(f"{path.name} has no rows.")
    found: Arrays = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if column.null_count:
            raise InvalidInput(f"{path.name}, column {name!r}: {column.null_count} missing values.")
        try:
            array = np.array(column.to_pylist())
        except ValueError:
            raise InvalidInput(f"{path.name}, column {name!r}: its lists differ in size.") from None
        if array.dtype.kind not in "biuf":
            raise InvalidInput(
                f"{path.name}, column {name!r}: it has {column.type}, and arrays take numbers; "
                "leave the column out, or write its categories as numbers."
            )
        found[name] = array
    return found


def load_images(path: Path, options: Table) -> Arrays:
    """Return the images of a folder with a folder for each class: `x` from 0 to 1, and `y`.

    `options` may have `classes`, the names of the classes in order (by default those of the
    folder, sorted: then every site must have all of them), `size` (height and width) and `gray`.
    """
    from PIL import Image, UnidentifiedImageError

    there = sorted(each.name for each in path.iterdir() if each.is_dir())
    classes = options.get("classes", there)
    if not isinstance(classes, list) or not classes or not {*there} <= {*classes}:
        known = ", ".join(map(str, classes)) if isinstance(classes, list) else repr(classes)
        raise InvalidInput(f"{path.name} has the folders {', '.join(there)}; classes: {known}.")
    size = options.get("size")
    x, y = [], []
    for label, name in enumerate(classes):
        files = sorted(f for f in path.glob(f"{name}/*") if f.suffix.lower() in PICTURES)
        for file in files:
            try:
                with Image.open(file) as image:
                    picture = image.convert("L" if options.get("gray") is True else "RGB")
            except (OSError, UnidentifiedImageError):
                raise InvalidInput(f"{name}/{file.name} is not an image.") from None
            if size is not None:
                picture = picture.resize((size[1], size[0]))
            pixels = np.asarray(picture, np.float32) / 255
            x.append(pixels if pixels.ndim == 3 else pixels[..., None])
            y.append(label)
            if x[-1].shape != x[0].shape:
                raise InvalidInput(
                    f"{name}/{file.name} has shape {x[-1].shape}, and others {x[0].shape}; give "
                    "size = [height, width]."
                )
    if not x:
        raise InvalidInput(f"{path.name} has no images in folders of classes.")
    return {"x": np.stack(x), "y": np.asarray(y, np.int32)}


BY_CLIENTS: dict[str, Callable[[Path], Arrays]] = {
    "npz": load_npz,
    "safetensors": load_safetensors,
}
BY_SAMPLES: dict[str, Callable[[Path, Table], Arrays]] = {
    "parquet": load_arrow,
    "arrow": load_arrow,
    "images": load_images,
}
IMAGE_KEYS = ("classes", "size", "gray")


def check_options(where: str, loader: str, options: Table) -> None:
    """Raise for a key that an image folder does not take, or a value that cannot be right."""
    known = IMAGE_KEYS if loader == "images" else ()
    for key, value in options.items():
        if key not in known:
            own = ", ".join(("loader", "path", *known))
            raise InvalidInput(
                f"{where}: [data] has no key {key!r} with this loader; known: {own}."
            )
        if key == "size" and not (
            isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value)
        ):
            raise InvalidInput(f"{where}: [data] size takes [height, width], got {value!r}.")
