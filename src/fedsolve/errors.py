"""Exceptions that Fedsolve raises. Their messages name the cause and a remedy in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from fedsolve.solving.result import Run


class InvalidInput(ValueError):
    """An argument, a file or a configuration value cannot be used.

    The message names the value, the reason and what would be accepted.

    Example:
        >>> import fedsolve as fs
        >>> issubclass(fs.InvalidInput, ValueError)
        True
    """


class ClientError(RuntimeError):
    """A client method failed. The debug runtime raises it; the message names client and round."""


class Stopped(Exception):
    """A run ended early.

    Args:
        message: Why the run ended, in one sentence.
        run: The results up to the last valid round, also available as the attribute `run`.
    """

    run: Run

    def __init__(self, message: str, run: object):
        super().__init__(message)
        self.run = cast("Run", run)


class Diverged(Stopped):
    """A value became NaN or infinite; the message names round, client and quantity."""


class ProcessLost(RuntimeError):
    """Another process of a run on several processes was lost."""


class Interrupted(Stopped):
    """The user interrupted the run (Ctrl-C)."""
