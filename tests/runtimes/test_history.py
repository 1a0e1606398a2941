"""The history's columns, and the names that they had in version 0.1."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedsolve as fs
from fedsolve.federation.counters import Count
from fedsolve.runtimes.history import (
    History,
    entry_history,
    host_history,
    joined,
    no_history,
    truncate_at_stop,
)
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


def test_only_evaluated_spans_have_entries_and_columns_have_their_order():
    spans = np.asarray([[0, 2, 1], [2, 4, 0], [4, 5, 1]], np.int32)
    slots = np.arange(4.0)  # the program has more slots than spans
    exact = Count(jnp.full(4, 2**20, jnp.uint32), jnp.arange(4, dtype=jnp.uint32))
    found = host_history({"bytes_up": exact, "objective": slots}, spans)
    assert list(found) == ["round", "objective", "bytes_up"]
    np.testing.assert_array_equal(found["round"], [2, 5])
    np.testing.assert_array_equal(found["objective"], [0, 2])
    np.testing.assert_array_equal(found["bytes_up"], [2**36, 2**36 + 2])
    one = entry_history({"extra": 1.0, "constraint": 2.0, "objective": jnp.ones(2)}, 7)
    assert {name: values.tolist() for name, values in one.items()} == {
        "round": [7],
        "objective": [[1, 1]],
        "constraint": [2],
        "extra": [1],
    }
    assert list(one) == ["round", "objective", "constraint", "extra"]


@pytest.mark.parametrize(("flags", "kept"), [([0, 0, 0, 1], 3), ([0, 1, 1, 0], 2), ([1, 0, 0], 1)])
def test_a_run_ends_after_the_span_at_which_its_rule_holds(flags, kept):
    spans = np.asarray([[0, 1, 1], [1, 2, 1], [2, 3, 1]], np.int32)
    entries = {"stopped": np.asarray(flags, bool), "objective": np.zeros(4)}
    found, stopped = truncate_at_stop(entries, spans)
    np.testing.assert_array_equal(found, spans[:kept])
    assert stopped == any(flags[:3])
    assert list(entries) == ["objective"]
    assert truncate_at_stop(entries, spans) == (spans, False)
