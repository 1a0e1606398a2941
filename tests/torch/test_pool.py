"""Clients in threads, each with one PyTorch thread."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from fedsolve.torch import pool  # noqa: E402


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    pool._workers.cache_clear()
    yield
    torch.set_num_threads(before)
    pool._workers.cache_clear()


def in_a_new_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_a_client_has_one_thread_and_others_have_what_the_user_chose(three_threads):
    threads = pool.Clients(lambda number: (number, torch.get_num_threads()))
    for _ in range(8):  # the calls that are timed, and some after them
        assert threads([(number,) for number in range(5)]) == [(n, 1) for n in range(5)]
    assert threads([(7,)]) == [(7, 3)]
    assert torch.get_num_threads() == 3
    assert in_a_new_thread(torch.get_num_threads) == 3


@pytest.mark.parametrize("together", [True, False])
def test_what_was_faster_is_kept(together, monkeypatch):
    monkeypatch.setattr(pool, "cores", lambda: 2)
    pool._workers.cache_clear()
    lock, seen = threading.Lock(), []

    def wait(number):
        seen.append(threading.get_ident())
        if together:
            time.sleep(0.01)  # as PyTorch does, others may run
        else:
            busy = time.perf_counter() + 0.002 * (2 if lock.locked() else 1)
            with lock:
                while time.perf_counter() < busy:
                    pass
                time.sleep(0.003 if len(set(seen)) > 1 else 0)
        return number

    clients = pool.Clients(wait)
    for _ in range(5):
        seen.clear()
        assert clients([(number,) for number in range(6)]) == list(range(6))
    assert clients._together() is together
    seen.clear()
    clients([(number,) for number in range(6)])
    assert (len(set(seen)) > 1) is together
    pool._workers.cache_clear()


def test_an_error_of_a_client_is_raised():
    def fail(number):
        raise ValueError(f"client {number}")

    with pytest.raises(ValueError, match="client 0"):
        pool.Clients(fail)([(0,), (1,)])
