"""What a user is told when something is wrong: one sentence, never a traceback from JAX."""

from __future__ import annotations

from typing import Any


class InvalidInput(ValueError):
    """Something the user gave cannot be used; the message says what, where, and what would be."""


class ClientError(RuntimeError):
    """A client's method failed; raised by the debug runtime, which knows client and round."""


class Stopped(Exception):
    """A run that ended early. `run` holds everything up to the last good round."""

    def __init__(self, message: str, run: Any):
        super().__init__(message)
        self.run = run


class Diverged(Stopped):
    """A non-finite value appeared; the message names round, client and quantity."""


class ProcessLost(RuntimeError):
    """Another process of the run was lost."""


class Interrupted(Stopped):
    """The user stopped the run (Ctrl-C)."""
