"""A file is replaced in one step, also where the power is cut in between."""

import errno
import os

import pytest

from fedsolve.storage.atomic import write_atomically


def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)

        def noted(first, *more, call=call, name=name):
            path = os.readlink(f"/proc/self/fd/{first}") if name == "fsync" else first
            calls.append((name, os.path.basename(path), os.path.getsize(path)))
            return call(first, *more)

        monkeypatch.setattr(os, name, noted)
    write_atomically(tmp_path / "kept", b"con", b"tent")
    folder = tmp_path.name, os.path.getsize(tmp_path)
    assert calls == [("fsync", "kept.new", 7), ("replace", "kept.new", 7), ("fsync", *folder)]
    write_atomically(tmp_path / "kept", b"new", before=tmp_path / "before")
    assert [name for name, *_ in calls[3:]] == ["fsync", "replace", "replace", "fsync"]
    assert (tmp_path / "kept").read_bytes() == b"new"
    assert (tmp_path / "before").read_bytes() == b"content"


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EINVAL])
def test_a_folder_that_could_not_be_forced_to_the_disk_is_an_error(tmp_path, monkeypatch, error):
    """Unless the file system cannot do that at all (EINVAL)."""
    fsync = os.fsync

    def fails(handle):
        if os.path.isdir(os.readlink(f"/proc/self/fd/{handle}")):
            raise OSError(error, os.strerror(error))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fails)
    if error == errno.EINVAL:
        write_atomically(tmp_path / "kept", b"content")
    else:
        with pytest.raises(OSError, match=os.strerror(error)):
            write_atomically(tmp_path / "kept", b"content")
    assert (tmp_path / "kept").read_bytes() == b"content"
