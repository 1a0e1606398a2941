"""The store of clients' states: which versions are kept and which are released."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsolve as fs
from fedsolve.storage.client_store import GROWTH, MARKS, Store


def test_held_versions_stay_and_others_make_room(tmp_path):
    first_row = np.zeros((), np.dtype([("value", np.float32, (2,))]))
    store = Store(tmp_path, first_row, 12)
    store.begin()
    assert store.row == 8

    def put(clients, value):
        rows = store.take(clients)
        rows["value"] = value
        store.put(clients, rows)

    def seen(clients):
        return store.take(clients)["value"][:, 0].tolist()

    put([7, 11], 1)
    assert len(store) == 2
    first = store.save()
    np.testing.assert_array_equal(first[1], [[7, 0], [11, 1]])  # neighbours lie side by side
    store.saved()
    put([7, 3], 2)
    store.hold("here")
    put([7, 5], 3)
    assert seen([7, 3, 5, 11, 4]) == [3, 2, 3, 1, 0]
    store.go_back("here")
    assert seen([7, 3, 5, 11]) == [2, 2, 0, 1]
    with pytest.raises(fs.InvalidInput, match="is the store of a run that is still going on"):
        Store(tmp_path, first_row, 12)
    store.close()
    again = Store(tmp_path, first_row, 12)
    again.load([first])
    assert len(again) == 2
    assert again.take([7, 3, 11])["value"][:, 0].tolist() == [1, 0, 1]
    again.close()
    for value in range(20):  # two versions and the present one never need more than three rows
        put([7], value)
        store.save()
        store.saved()
    assert store.take([7])["value"][0, 0] == 19
    assert store.save()[1][:, 1].max() < 8
    rows = (tmp_path / "rows").stat()
    assert 512 * rows.st_blocks >= rows.st_size  # no holes: a full disk is met when it grows
    assert GROWTH <= rows.st_size < 2 * GROWTH  # in large steps
    assert rows.st_size % store.row == 0


def test_a_place_is_for_one_run_and_its_last_two_checkpoints(tmp_path):
    first_row = np.zeros((), np.dtype([("value", np.int64)]))
    begun = Store(tmp_path, first_row, 3)
    begun.begin()
    begun.put([0], np.full(1, 7, first_row.dtype))
    begun.close()  # without a checkpoint: nobody needs the rows
    store = Store(tmp_path, first_row, 3)
    store.begin()
    assert (tmp_path / "rows").stat().st_size == store.row
    versions = []
    for value in range(3):
        store.put([0, 0], np.asarray([9, value]).astype(first_row.dtype))
        versions.append(store.save())
        store.saved()
    store.close()
    store = Store(tmp_path, first_row, 3)
    with pytest.raises(fs.InvalidInput, match="has the states of another run"):
        store.begin()
    with pytest.raises(fs.InvalidInput, match="does not have the states of this checkpoint"):
        store.load([versions[0]])  # its row may be another's by now
    store.load([versions[1]])
    assert store.take([0, 1])["value"].tolist() == [1, 0]
    store.close()
    (tmp_path / "rows").write_bytes(b"")
    store = Store(tmp_path, first_row, 3)
    with pytest.raises(fs.InvalidInput, match="is not whole: rows are missing"):
        store.load([versions[2]])
    store.close()
    (tmp_path / "marks.json").write_text("[")
    with pytest.raises(fs.InvalidInput, match=r"marks\.json cannot be read"):
        Store(tmp_path, first_row, 3).begin()
    with pytest.raises(fs.InvalidInput, match=r"Cannot write to the store .*: Not a directory"):
        Store(tmp_path / "rows" / "below", first_row, 3)
    with pytest.raises(fs.InvalidInput, match="store must be a folder or a mutable mapping, got 3"):
        Store(3, first_row, 3)


def test_rows_are_on_the_disk_before_the_checkpoint_that_needs_them(tmp_path, monkeypatch):
    first_row = np.zeros((), np.dtype([("value", np.int64)]))
    store, flushed = Store(tmp_path, first_row, 3), []
    store.begin()
    flush = np.memmap.flush
    monkeypatch.setattr(np.memmap, "flush", lambda rows: flushed.append(int(rows["value"][0])))
    store.put([1], np.full(1, 5, first_row.dtype))
    store.save()
    assert flushed == [5]
    monkeypatch.setattr(np.memmap, "flush", flush)
    store.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_versions_are_those_of_a_plain_dictionary(data):
    """Whatever is written, held, gone back to, saved and lost, in whatever order."""
    first_row = np.zeros((), np.dtype([("value", np.int64)]))
    place: dict[int, bytes] = {}
    store = Store(place, first_row, 6)
    store.begin()
    store.hold("a")
    now, held, kept, count, most = {}, {"a": {}}, [], 0, 0
    clients = st.lists(st.integers(0, 5), max_size=4)
    for step in data.draw(st.lists(st.sampled_from("ppphgsfc"), max_size=30)):
        if step == "p":
            for client in (who := data.draw(clients)):
                now[client] = count = count + 1
            rows = store.take(who)
            rows["value"] = [now[client] for client in who]
            store.put(who, rows)
        elif step == "h":
            store.hold("a")
            held["a"] = dict(now)
        elif step == "g":
            store.go_back("a")
            now = dict(held["a"])
        elif step in "sf":
            version = store.save(), dict(now)
            if step == "s":  # else the checkpoint could not be written
                store.saved()
                kept = [version, *kept][:2]
        elif kept:  # crash, and on from one of the two checkpoints
            if len(kept) > 1 and data.draw(st.booleans()):  # the newest is damaged
                kept = kept[1:]
            store = Store(place, first_row, 6)
            store.load([saved for saved, _ in kept])
            now = dict(kept[0][1])
            store.hold("a")
            held["a"] = dict(now)
        assert store.take(range(6))["value"].tolist() == [now.get(k, 0) for k in range(6)]
        assert len(store) == len(now)
        versions = [now, held["a"], *(version for _, version in kept)]
        most = max(most, len(set().union(*(version.items() for version in versions))))
    # Room for the present, what is held by name, and two checkpoints; then for their marks.
    assert len(place.keys() - {MARKS}) <= most
