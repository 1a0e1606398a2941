"""Download a data set's original files, check them and convert them to one npz file."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fedsolve.data.readers import Arrays
from fedsolve.data.sources import File, Source
from fedsolve.errors import InvalidInput

OFFLINE = "FEDSOLVE_OFFLINE"  # environment variable: whether nothing is to be downloaded


def fetch(name: str, source: Source, path: Path) -> None:
    """Download, check and convert a data set to the file `path`, which is complete or absent."""
    if os.environ.get(OFFLINE):
        raise InvalidInput(f"{name} is not on this machine, and jobs download nothing.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=".download-", dir=path.parent)
    except OSError as error:
        raise InvalidInput(f"Cannot keep {name} in {path.parent}: {error.strerror}.") from error
    try:
        files = [_download(name, file, Path(folder)) for file in source.files]
        arrays = source.parse(*files)
        if source.contents is not None and fingerprint(arrays) != source.contents:
            raise InvalidInput(
                f"The data set {name} from {source.files[0].url} has changed: it "
                "differs from the known version, so it was not kept."
            )
        complete = Path(folder, path.name)
        np.savez_compressed(complete, **arrays)  # type: ignore[arg-type]
        os.replace(complete, path)
    except (tarfile.TarError, zipfile.BadZipFile, ValueError, KeyError, StopIteration) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"The files of {name} cannot be read: {error}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()  # only if it is empty


def _download(name: str, file: File, folder: Path) -> Path:
    """Save a file, unpacked if it is `.gz` but not an archive, and compare its checksum."""
    import urllib.request  # slow to import, and rarely needed

    target = folder / file.name
    try:
        with urllib.request.urlopen(file.url, timeout=60) as answer, open(target, "wb") as out:
            stream: BinaryIO = gzip.GzipFile(fileobj=answer) if file.is_packed else answer  # type: ignore
            digest = hashlib.md5(usedforsecurity=False)
            while block := stream.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (OSError, EOFError) as error:  # among them urllib's URLError and timeouts
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise InvalidInput(
            f"The data set {name} is not on this machine, and {file.url} cannot be downloaded "
            f"({reason}). Put {name}.npz into a folder {name}, and set FEDSOLVE_DATA to the folder "
            "above it."
        ) from error
    if file.md5 is not None and digest.hexdigest() != file.md5:
        raise InvalidInput(
            f"{file.url} has the checksum {digest.hexdigest()}, not {file.md5}: "
            "it is damaged or has changed, so it was not kept."
        )
    return target


def fingerprint(arrays: Arrays) -> str:
    """Return the SHA-256 of names, types, shapes and values of the arrays."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()
