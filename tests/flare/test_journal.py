"""The server's journal survives a power cut."""

import os
from pathlib import Path

from fedsolve.flare.journal import Journal


def test_a_power_cut_loses_no_files(tmp_path, monkeypatch):
    """Whatever file a journal has was in its folder when that was last forced to the disk."""
    kept, fsync = {}, os.fsync

    def forced(handle):
        fsync(handle)
        place = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if place.is_dir():
            kept[place] = {path.name for path in place.iterdir()}

    monkeypatch.setattr(os, "fsync", forced)
    home = tmp_path / "runs/trial/0"
    journal = Journal(home)
    assert journal.load() == (None, [])
    for step in range(3):
        journal.append([b"ans", b"wer"])
        assert {path.name for path in home.iterdir()} <= kept[home]
        journal.restart([b"base ", b"%d" % step])
    assert kept[tmp_path] == {"runs"}
    assert kept[tmp_path / "runs"] == {"trial"}
    journal.append([b"last"])
    again = Journal(home)
    assert again.load() == (b"base 2", [b"last"])
