"""A file is replaced in one step, also where the power is cut in between."""

import errno
import os

import pytest

import fedsolve as fs
from fedsolve.storage import atomic
from fedsolve.storage.atomic import LOCK_RETRY, check_writable, open_locked, write_atomically


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


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    write_atomically(tmp_path / "kept", b"content")
    before = open_files()

    def fails(*paths):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="broken"):
            write_atomically(tmp_path / "kept", b"new")
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept").read_bytes() == b"content"
    write_atomically(tmp_path / "first", b"content", before=tmp_path / "before")
    assert sorted(os.listdir(tmp_path)) == ["first", "kept"]  # there was none before
    assert open_files() == before


def test_a_folder_is_made_and_tried(tmp_path):
    check_writable(tmp_path / "one" / "two")
    check_writable(tmp_path / "one" / "two")
    assert list((tmp_path / "one" / "two").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(fs.InvalidInput, match=r"Cannot write to .*file/folder: Not a directory\."):
        check_writable(tmp_path / "file" / "folder")


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now, self.naps, self.at_nap = 100.0, [], {}

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.naps.append(seconds)
        self.at_nap.get(len(self.naps), lambda: None)()


def test_a_lock_is_waited_for_as_long_as_asked(tmp_path, monkeypatch):
    clock, before = Clock(), open_files()
    monkeypatch.setattr(atomic, "time", clock)
    first = open_locked(tmp_path / "lock")
    assert first is not None
    assert clock.naps == []
    assert open_locked(tmp_path / "lock") is None
    assert clock.naps == []  # at once
    assert open_locked(tmp_path / "lock", 3.5 * LOCK_RETRY) is None
    assert clock.naps == [LOCK_RETRY] * 4
    assert open_files() == before + 1
    clock.at_nap[6] = first.close
    second = open_locked(tmp_path / "lock", 3.5 * LOCK_RETRY)
    assert second is not None
    assert clock.naps == [LOCK_RETRY] * 6
    second.close()
