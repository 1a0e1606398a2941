"""Spans between evaluations, and how they are cut into calls of the compiled program."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsolve.runtimes.chunks import GRID, LAST, SLOTS, padded, spans_of, split, until

RUNS = st.tuples(st.integers(0, 300), st.integers(1, 900), st.integers(1, 70))


def covers(spans, first, last):
    """Whether the spans are all rounds from `first` to `last`, once and in order."""
    starts, stops = spans[:, 0], spans[:, 1]
    inside = (starts[1:] == stops[:-1]).all() and (starts < stops).all()
    return inside and (starts[0], stops[-1]) == (first, last)


@given(RUNS)
def test_spans_end_at_multiples_of_a_number_and_at_the_last_round(run):
    first, more, every = run
    spans = spans_of(first, first + more, every)
    assert covers(spans, first, first + more)
    assert (spans[:-1, 1] % every == 0).all()
    assert (spans[:, 1] - spans[:, 0] <= every).all()
    wanted = np.where(spans[:, 1] % every == 0, GRID, LAST)
    np.testing.assert_array_equal(spans[:, 2], wanted)


@given(RUNS, st.integers(1, 400))
def test_chunks_use_the_budget_and_evaluate_where_the_spans_do(run, budget):
    first, more, every = run
    spans = rest = spans_of(first, first + more, every)
    done, evaluated = first, []
    while len(rest):
        now, rest = split(rest, budget)
        assert covers(now, done, now[-1, 1])
        done = now[-1, 1]
        used = done - now[0, 0]
        assert used == budget or not len(rest) or len(now) == SLOTS
        assert used <= budget
        assert len(now) <= SLOTS
        assert (now[:-1, 2] == 1).all()
        evaluated += now[now[:, 2] > 0, 1].tolist()
        whole = padded(now)
        assert whole.shape == (SLOTS, 3)
        np.testing.assert_array_equal(whole[: len(now)], now)
        assert not whole[len(now) :].any()
    assert done == first + more
    assert evaluated == spans[:, 1].tolist()


@given(RUNS, st.data())
def test_a_part_of_the_spans_is_evaluated_at_its_end(run, data):
    first, more, every = run
    spans = spans_of(first, first + more, every)
    spans[-1, 2] = 0  # truncated by `split`
    stop = data.draw(st.integers(first + 1, first + more))
    part = until(spans, stop)
    assert covers(part, first, stop)
    assert part[-1, 2] == 1
    np.testing.assert_array_equal(part[:-1], spans[: len(part) - 1])


def test_no_rounds_before_the_first():
    assert until(spans_of(5, 20, 10), 5).shape == (0, 3)


@pytest.mark.parametrize("budget", [SLOTS - 1, SLOTS, SLOTS + 1])
def test_a_call_has_so_many_slots(budget):
    now, rest = split(spans_of(0, 3 * SLOTS, 1), budget)
    assert len(now) == min(budget, SLOTS)
    assert len(now) + len(rest) == 3 * SLOTS
