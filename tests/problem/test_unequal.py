"""Clients of very different sizes."""

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.problem import stacking


def test_padding_that_multiplies_the_memory_is_announced(monkeypatch):
    """One client of 2000 rows beside 200 of 5, at a hundredth of the limit."""
    monkeypatch.setattr(stacking, "MUCH", 2_000_000)
    clients = [{"x": np.zeros((n, 4), np.float32)} for n in [2000, *[5] * 200]]
    with pytest.warns(UserWarning, match=r"largest \(client 0, 2000 samples; the median has 5\)"):
        fs.stack_clients(clients)
    fs.stack_clients(clients[1:])  # equal sizes: no warning
    monkeypatch.setattr(stacking, "MUCH", 2**30)
    fs.stack_clients(clients)  # little memory: no warning
