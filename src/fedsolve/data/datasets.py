"""Data sets by name.

`load("mnist")` looks for `mnist/mnist.npz`, or for the original files in `mnist/`, in the folder
named by `FEDSOLVE_DATA`, then in the cache (`$XDG_CACHE_HOME/fedsolve/data`, by default
`~/.cache/fedsolve/data`). If it is in neither, the original files are downloaded, compared with
their published checksums, and stored in the cache as `mnist.npz`. A download that fails leaves
nothing behind.

To add a data set, write its two functions in `readers` and one entry in `sources.SOURCES`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedsolve.data.download import fetch
from fedsolve.data.readers import COLUMNS as COLUMNS
from fedsolve.data.readers import NUMERIC as NUMERIC
from fedsolve.data.readers import SIDE as SIDE
from fedsolve.data.readers import Arrays, Dataset
from fedsolve.data.sources import SOURCES, File, Source
from fedsolve.errors import InvalidInput

__all__ = ["SOURCES", "Arrays", "Dataset", "File", "Source", "cache", "kept", "load"]


def load(name: str) -> Dataset:
    """Load a data set, and download it first if it is not on this machine.

    | name | arrays |
    |---|---|
    | `mnist` | `x` 28×28, 0 to 255; `y` the digit |
    | `cifar10` | `x` 32×32×3, 0 to 255; `y`, ten classes |
    | `adult` | the 14 columns of the census, codes for words; `income`: 1 above 50,000 |
    | `qsar_oral_toxicity` | `x` 1024 bits; `y`: 1 for toxic; there is no test part |
    | `tcga_brca` | `x` 39 numbers; `time` in days; `event` 1: death; `region`, six of them |
    | `food101` | `x` 64×64×3 (the middle of the picture, scaled), 0 to 255; `y`, 101 classes |

    Args:
        name: One of the names above.

    Returns:
        The arrays of the training and test parts, and the names of their codes.

    Raises:
        InvalidInput: If there is no data set of that name, if it cannot be downloaded, or if its
            file is damaged.

    Example:
        >>> import fedsolve as fs
        >>> fs.datasets.load("mnist")  # doctest: +SKIP
        Dataset(train: x uint8[60000, 28, 28], y uint8[60000]; test: x uint8[10000, 28, 28], ...)
        >>> fs.datasets.load("minst")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        fedsolve.errors.InvalidInput: There is no data set 'minst'; there are mnist, cifar10, ...
    """
    if name not in SOURCES:
        raise InvalidInput(f"There is no data set {name!r}; there are {', '.join(SOURCES)}.")
    source, folders = SOURCES[name], [cache() / name]
    if "FEDSOLVE_DATA" in os.environ:
        folders.insert(0, Path(os.environ["FEDSOLVE_DATA"], name))
    files = _files(name, source, folders)
    if not files:
        files = [folders[-1] / f"{name}.npz"]
        fetch(name, source, files[0])
    try:
        if files[0].suffix != ".npz":
            return source.present(source.parse(*files))
        with np.load(files[0], allow_pickle=False) as arrays:
            return source.present(arrays)
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise InvalidInput(f"{files[0]} is not the data set {name}: {error}.") from error


def _files(name: str, source: Source, folders: list[Path]) -> list[Path]:
    """Return the npz file, or all original files, in the first folder that has them."""
    for folder in folders:
        for files in ([f"{name}.npz"], [file.name for file in source.files]):
            if all((folder / file).is_file() for file in files):
                return [folder / file for file in files]
    return []


def cache() -> Path:
    """Return the folder where downloaded data sets are kept.

    Returns:
        `$XDG_CACHE_HOME/fedsolve/data`, by default `~/.cache/fedsolve/data`.

    Example:
        >>> import fedsolve as fs
        >>> fs.datasets.cache().parts[-2:]
        ('fedsolve', 'data')
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "fedsolve", "data")


def kept(name: str, make: Callable[[], Arrays]) -> Arrays:
    """Return cached arrays, and make and store them if they are not in the cache.

    A damaged file is replaced. If the cache cannot be written, the arrays are made at every call.

    Args:
        name: The name of the file in the cache. It must change whenever the arrays would.
        make: Function that computes the arrays.

    Returns:
        The arrays, by name.

    Example:
        >>> import fedsolve as fs
        >>> import numpy as np
        >>> fs.datasets.kept("squares-4", lambda: {"x": np.arange(4) ** 2})  # doctest: +SKIP
        {'x': array([0, 1, 4, 9])}
    """
    path = cache().with_name("made") / f"{name}.npz"
    damaged = contextlib.suppress(OSError, ValueError, EOFError, zipfile.BadZipFile)
    with damaged, np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)
    found = make()
    with contextlib.suppress(OSError):  # if there is no place for it, it is made again every time
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as folder:
            complete = Path(folder, path.name)
            np.savez(complete, **found)  # type: ignore[arg-type]
            os.replace(complete, path)
    return found
