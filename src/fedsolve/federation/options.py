"""What surrounds a run and is neither the problem's nor the algorithm's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax.sharding import Mesh

from fedsolve.federation.clock import Clock
from fedsolve.solving.stopping import Stop

Arrivals = Callable[[Any, int, Any], Any]  # round, exchange, clients -> which answers arrive
Follow = tuple[tuple[str, Callable], ...]  # names, and functions of (problem, params)


class Setting(eqx.Module):
    """What `solve` was told about how to run: see there. Numbers in it are leaves."""

    arrivals: Arrivals | None = None
    clients_at_once: int | None = None
    stop: Stop | None = None
    follow: Follow = ()
    clock: Clock | None = None
    mesh: Mesh | None = eqx.field(static=True, default=None)
