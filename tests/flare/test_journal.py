"""A journal keeps what it acknowledged, whatever its disk does, and nothing else."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import unittest.mock
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.flare import jobs, roster
from fedsolve.flare import journal as module
from fedsolve.flare.jobs import Coordinator, SiteJob
from fedsolve.flare.journal import HEADER, CannotWrite, Damaged, Journal, read
from fedsolve.flare.processes import HOME
from fedsolve.flare.roster import Roster, TooFew
from fedsolve.flare.site import SiteClients
from fedsolve.storage import atomic
from fedsolve.storage.arrays import decode, encode
from tests.support import deployment, examples
from tests.support.in_process import Wires, deploy

RECORDS = [[b"seven b"], [b"two", memoryview(b" parts")], [bytes(20)], [b"x"], [b"the last one"]]
WHOLE = [b"".join(map(bytes, parts)) for parts in RECORDS]
CHANGES = ("write", "ftruncate")  # calls that fail where everything was made read-only
CALLS = ("open", "write", "fdatasync", "fsync", "ftruncate", "replace", "unlink")


class PowerCut(BaseException):
    pass


class Disk:
    """The system's calls, some of which fail; remembers what would survive a power cut.

    `fails(call, number)` says what the call with that number raises, if anything. With `room`, so
    many bytes can be written; a call of `write` takes at most `most` of them.
    """

    def __init__(self, monkeypatch, room=10**9, most=10**9, fails=lambda call, number: None):
        self.room, self.most, self.fails, self.calls = room, most, fails, 0
        self.content, self.folders = {}, {}  # by inode; what a folder lists, by its path
        for name in CALLS:
            setattr(self, name, self._made(name, getattr(os, name)))
        for each in (module, atomic):
            monkeypatch.setattr(each, "os", self)

    def __getattr__(self, name):
        return getattr(os, name)

    def _made(self, name, call):
        def made(first, *more):
            self.calls += 1
            if (error := self.fails(name, self.calls)) is not None:
                raise error
            if name == "write":
                size = min(len(more[0]), self.room, self.most)
                if size == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.room -= size
                more = (more[0][:size],)
            done = call(first, *more)
            if name in ("fsync", "fdatasync"):
                self._keep(first)
            return done

        return made

    def _keep(self, handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            self.folders[path] = {p.name: p.stat().st_ino for p in path.iterdir()}
        else:
            self.content[os.fstat(handle).st_ino] = path.read_bytes()

    def after_power_cut(self, home, place):
        """Write to `place` what is left of a folder."""
        place.mkdir()
        for name, inode in self.folders.get(home, {}).items():
            (place / name).write_bytes(self.content.get(inode, b""))


def failure(number):
    return OSError(number, os.strerror(number))


def write_all(journal, records=RECORDS):
    """Return the records that were acknowledged."""
    kept = []
    for parts in records:
        try:
            journal.append(parts)
            kept.append(b"".join(map(bytes, parts)))
        except CannotWrite:
            pass
        assert read(journal._home) == (None, kept)
    return kept


@pytest.mark.parametrize("repair_fails", [False, True])
def test_a_record_is_there_whole_or_not_at_all_wherever_the_room_ends(
    tmp_path, monkeypatch, repair_fails
):
    """At every byte, as a full disk does; and where the file cannot be made shorter either."""
    total = sum(map(len, WHOLE)) + len(WHOLE) * HEADER.size
    for room in range(total + 1):
        with monkeypatch.context() as patch:
            journal = Journal(tmp_path / str(room))
            journal.load()
            disk = Disk(patch, room, most=5)
            if repair_fails:
                disk.fails = lambda call, _: failure(errno.EIO) if call == "ftruncate" else None
            kept = write_all(journal)
            assert (len(kept) == len(RECORDS)) == (room == total)
            disk.room, disk.fails = 10**9, lambda call, number: None
            journal.append([b"after room was made"])
            kept.append(b"after room was made")
            assert read(tmp_path / str(room)) == (None, kept)
        assert Journal(tmp_path / str(room)).load() == (None, kept)


@pytest.mark.parametrize("most", [1, 3, 8])
def test_short_writes_are_continued(tmp_path, monkeypatch, most):
    journal = Journal(tmp_path)
    journal.load()
    Disk(monkeypatch, most=most)
    assert write_all(journal) == WHOLE


@pytest.mark.parametrize("base", [None, b"base"])
@pytest.mark.parametrize("lasting", [1, 3])
def test_any_call_may_fail(tmp_path, monkeypatch, base, lasting):
    """EIO from any of the system's calls, once or a few times: the journal raises, and has what it
    acknowledged, also after it was restarted with a base in between."""
    number, calls = 0, 1
    while number < calls:
        number += 1
        home = tmp_path / str(number)
        with monkeypatch.context() as patch:
            journal = Journal(home)
            journal.load()
            bad = range(number, number + lasting)
            disk = Disk(patch, fails=lambda _, n, bad=bad: failure(errno.EIO) if n in bad else None)
            begun, kept = None, []
            for step, parts in enumerate(RECORDS):
                if step == 2 and base is not None:
                    with contextlib.suppress(CannotWrite):
                        journal.restart([base])
                        begun, kept = base, []
                with contextlib.suppress(CannotWrite):
                    journal.append(parts)
                    kept.append(WHOLE[step])
            calls = disk.calls
            disk.fails = lambda call, n: None
            journal.append([b"at last"])
            kept.append(b"at last")
        assert read(home) == (begun, kept)
        assert Journal(home).load() == (begun, kept)
    assert number > 10


@pytest.mark.parametrize("torn", [False, True])
def test_a_power_cut_at_any_call_loses_nothing_that_was_acknowledged(tmp_path, monkeypatch, torn):
    """Only what was forced to the disk is left: contents, and lists of files."""
    cut, number = True, 0
    while cut:
        number, cut = number + 1, False
        home = tmp_path / str(number) / "run"
        home.parent.mkdir()

        def fails(call, now, number=number):
            return PowerCut() if now == number else None

        with monkeypatch.context() as patch:
            disk = Disk(patch, fails=fails)
            begun, kept, coming = None, [], None
            try:
                journal = Journal(home)
                journal.load()
                for step, parts in enumerate(RECORDS):
                    if step == 3:
                        coming = (b"base", [])
                        journal.restart([b"base"])
                        begun, kept = coming
                    coming = (begun, [*kept, WHOLE[step]])
                    journal.append(parts)
                    kept = coming[1]
            except PowerCut:
                cut = True
        left = tmp_path / f"{number} left"
        disk.after_power_cut(home, left)
        if torn and (last := sorted(left.glob("records-*"))):
            with open(last[-1], "ab") as file:
                file.write(HEADER.pack(100, 1) + bytes(30))
        found = Journal(left).load()
        assert found in [(begun, kept), coming]
        again = Journal(left)
        again.load()
        again.append([b"next"])
        assert read(left) == (found[0], [*found[1], b"next"])
    assert number > 20


def test_new_folders_survive_a_power_cut(tmp_path, monkeypatch):
    disk = Disk(monkeypatch)
    Journal(tmp_path / "runs/trial/0").load()
    assert disk.folders[tmp_path].keys() == {"runs"}
    assert disk.folders[tmp_path / "runs"].keys() == {"trial"}
    assert disk.folders[tmp_path / "runs/trial"].keys() == {"0"}


def test_a_last_record_that_is_not_whole_is_removed(tmp_path):
    """Of any length: of a header alone, of zeros (a file that grew before its data were there)."""
    whole = HEADER.pack(7, 0) + b"damaged"
    for number, tail in enumerate([whole[:n] for n in range(1, len(whole) + 1)] + [bytes(40)]):
        journal = Journal(tmp_path / str(number))
        journal.load()
        journal.append([b"first"])
        path = tmp_path / str(number) / "records-0.log"
        with open(path, "ab") as file:
            file.write(tail)
        assert read(tmp_path / str(number)) == (None, [b"first"])
        again = Journal(tmp_path / str(number))
        assert again.load() == (None, [b"first"])
        assert path.stat().st_size == HEADER.size + len(b"first")


def test_records_that_no_base_belongs_to_are_not_used(tmp_path):
    """As in a copy that was made while the journal was replaced."""
    (tmp_path / "records-1.log").write_bytes(HEADER.pack(3, 0) + b"old")
    journal = Journal(tmp_path)
    assert journal.load() == (None, [])
    journal.restart([b"base"])
    journal.append([b"new"])
    assert read(tmp_path) == (b"base", [b"new"])


def test_a_damaged_middle_is_named_and_nothing_behind_it_is_used(tmp_path):
    """A bit that changed anywhere in the first of three records."""
    journal = Journal(tmp_path)
    journal.load()
    for record in ([b"one"], [b"two"], [bytes(range(50))]):
        journal.append(record)
    path = tmp_path / "records-0.log"
    data = path.read_bytes()
    for position in range(HEADER.size + 3):
        damaged = bytearray(data)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        for reading in (read, lambda home: Journal(home).load()):
            with pytest.raises(
                Damaged, match=r"damaged at byte 0: 0 records before it .* and 2 behind"
            ):
                reading(tmp_path)
        assert path.read_bytes() == damaged
    for between in (b"j", b"junk"):
        path.write_bytes(data[:15] + between + data[15:])
        with pytest.raises(Damaged, match="at byte 15: 1 records before it are whole"):
            read(tmp_path)


@pytest.fixture
def small(tmp_path):
    """A real file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", place]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs more rights than this user has")
    yield place
    subprocess.run(["umount", "-l", place], check=True)  # a failed test may have files open there


def test_a_real_disk_that_is_full(small):
    journal = Journal(small / "site")
    assert (small / "site").stat().st_mode & 0o077 == 0  # states are nobody else's affair
    journal.load()
    filler, kept, refused = small / "filler", [], 0
    filler.write_bytes(bytes(100_000))
    for number in range(200):
        record = number.to_bytes(2, "little") * 900
        try:
            journal.append([record])
            kept.append(record)
        except CannotWrite:
            refused += 1
            with pytest.raises(CannotWrite, match="its journal: No space left on device"):
                journal.restart([bytes(300_000)])
            if refused == 3:
                filler.unlink()
        if refused > 6:
            break
    assert len(kept) > 60
    assert read(small / "site") == Journal(small / "site").load() == (None, kept)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
def test_a_site_that_cannot_write_says_so_and_loses_nothing(tmp_path, monkeypatch, error):
    """Its disk is full, or was made read-only: its clients count as missing meanwhile; then it goes
    on, also after a restart."""
    problem, log = examples.least_squares(), []
    algorithm = fs.FedSGM(0.05, 0.1, uplink=fs.TopK(0.4))
    wires = Wires(problem, algorithm, tmp_path)
    disk = Disk(monkeypatch)

    def lose(site, number):
        bad = site == "site-2" and 40 < number < 90
        disk.room = 100 if bad and error == errno.ENOSPC else 10**9
        disk.fails = lambda call, _: (
            failure(error) if bad and error == errno.EROFS and call in CHANGES else None
        )
        return "site killed" if site == "site-2" and 100 < number < 140 else ""

    wires.lose = lose  # pyright: ignore[reportAttributeAccessIssue]
    run, link = deploy(problem, algorithm, wires, tmp_path / "server", 30, log=log)
    assert run.rounds == 30
    assert f"site-2: cannot write its journal: {os.strerror(error)}" in log
    assert not [entry for entry in log if "lost" in entry or "older copy" in entry]
    heads = [decode(record, None)[0] for record in read(tmp_path / "site-2")[1]]
    rounds = [head["round"] for head in heads]
    assert link.settled["site-2"][0] == max(rounds) == 29
    assert 0 < len(set(range(30)) - set(rounds)) < 20
    assert np.isfinite(run.history["objective"]).all()
    told = wires.shares["site-2"].answer(encode({"kind": "hello", "total": 6}, {}))
    assert decode(told, None)[0]["status"] == "ok"


def test_a_server_that_cannot_write_ends_the_run_with_a_sentence_and_goes_on_later(
    tmp_path, monkeypatch
):
    """To the same bits as one that was never stopped."""
    problem = examples.least_squares()
    algorithm = fs.FedSGM(0.05, 0.1, participants=3, uplink=fs.TopK(0.4))
    whole, _ = deploy(
        problem, algorithm, Wires(problem, algorithm, tmp_path / "w"), tmp_path / "whole", 9
    )
    wires = Wires(problem, algorithm, tmp_path / "a")
    with monkeypatch.context() as patch:
        disk, ask = Disk(patch), Roster.end_round

        def full_later(self, round):
            disk.room = 100 if round == 5 else 10**9
            ask(self, round)

        patch.setattr(Roster, "end_round", full_later)
        with pytest.raises(CannotWrite, match="cannot write its journal: No space left on device"):
            deploy(problem, algorithm, wires, tmp_path / "cut", 9)
    run, _ = deploy(problem, algorithm, wires, tmp_path / "cut", 9)
    assert run.rounds == 9
    np.testing.assert_array_equal(run.params, whole.params)


def test_changed_data_of_a_site_are_refused_in_the_same_run(tmp_path):
    """Its clients' states belong to the data with which the run began."""
    algorithm = fs.FedSGM(0.05, 0.1)
    first, other = examples.least_squares(), examples.least_squares(seed=1)
    SiteClients(tmp_path, first, algorithm, 0)
    SiteClients(tmp_path, first, algorithm, 0)
    changed = jax.tree.map(lambda leaf: np.array(leaf), first.samples)
    jax.tree.leaves(changed)[0].flat[-1] += 1e-3
    fewer = jax.tree.map(lambda leaf: leaf[:5], first.samples)
    for samples in (other.samples, changed, fewer):
        problem = eqx.tree_at(lambda p: p.samples, first, samples)
        with pytest.raises(fs.InvalidInput, match="not those with which this run began: put those"):
            SiteClients(tmp_path, problem, algorithm, 0)


def test_another_version_at_one_end_is_named(tmp_path, monkeypatch):
    problem, log = examples.least_squares(), []
    algorithm = fs.FedSGM(0.05, 0.1)
    wires = Wires(problem, algorithm, tmp_path)
    monkeypatch.setattr(roster, "version", lambda: "9.9")
    with pytest.raises(TooFew, match="no site is ready"):
        deploy(problem, algorithm, wires, tmp_path / "server", 2, log=log)
    assert len(log) == 4
    assert all(f"has fedsolve {fs.__version__}, and the server has 9.9" in line for line in log)


def test_a_run_folder_of_another_user_is_named(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only the administrator of a machine can become another user")
    (tmp_path / "runs/trial/0").mkdir(parents=True)
    for folder in [tmp_path, *tmp_path.parents[:-2]]:
        folder.chmod(folder.stat().st_mode | 0o055)
    monkeypatch.setenv(HOME, str(tmp_path))
    monkeypatch.setattr(jobs, "collab", unittest.mock.MagicMock())
    monkeypatch.setattr(jobs, "REPORT_TIMEOUT", 0.0)
    experiment = deployment.experiment(2)
    monkeypatch.setattr(jobs, "built", lambda text: experiment)
    site = SiteJob(json.dumps(experiment.resolved), "trial")
    site._experiment = experiment
    server = Coordinator(json.dumps(experiment.resolved), "trial")
    os.seteuid(65534)
    try:
        answer, _ = decode(site.answer(0, encode({"kind": "hello", "total": 6}, {})), None)
        server.run()
        with pytest.raises(CannotWrite, match=r"/0: cannot write its journal: Permission denied"):
            Journal(tmp_path / "runs/trial/0").load()
    finally:
        os.seteuid(0)
    assert answer["reason"] == "its files: Permission denied; see this site's log"
    lock = tmp_path / "runs/trial/lock"
    why = f"The server cannot use {lock}: Permission denied."
    assert server._news == [{"error": why, "refused": False}]
