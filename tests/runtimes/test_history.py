"""The history's columns, and the names that they had in version 0.1."""

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.runtimes.history import History, joined, no_history
from tests.support import examples


def test_names_of_version_0_1_still_work():
    algorithm = fs.PPBC(0.05, 0.001, select_round=fs.participation.Top(2), weighting="FOLB")
    history = fs.solve(examples.least_squares(), algorithm, rounds=4).history
    np.testing.assert_array_equal(history["messages"], history["vectors_up"])
    np.testing.assert_array_equal(history["messages_total"], history["vectors_up_total"])
    both = history["messages_up_total"] + history["messages_down_total"]
    np.testing.assert_array_equal(history["messages_both_ways"], both)
    assert all(name in history for name in ("messages", "messages_total", "messages_both_ways"))
    assert "messages" not in set(history)
    assert "messages_both_ways" not in no_history()
    with pytest.raises(KeyError, match="nothing"):
        history["nothing"]


def test_messages_and_vectors_are_counted_apart():
    """FedSGM asks for g_j, a number, and for a direction, a vector."""
    algorithm = fs.FedSGM(0.05, 0.1, participants=3)
    history = fs.solve(examples.least_squares(), algorithm, rounds=2).history
    np.testing.assert_array_equal(history["messages_up"], [6, 6])
    np.testing.assert_array_equal(history["messages_down"], [6, 6])
    np.testing.assert_array_equal(history["vectors_up"], [3, 3])


def test_parts_without_entries_do_not_matter():
    whole = History(round=np.arange(3), objective=np.ones(3))
    found = joined([no_history(), whole, no_history()])
    assert found.keys() == whole.keys()
    np.testing.assert_array_equal(found["round"], whole["round"])
