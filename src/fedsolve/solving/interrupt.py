"""Ctrl-C and its like as a flag that is looked at between two steps.

An exception that arrives in the midst of a compiled program can be swallowed there; a flag cannot.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Flag:
    """Inside its `with` block, the first of these signals only raises the flag; a second one does
    what it always did. In a thread, where signals cannot be caught, nothing is changed."""

    def __init__(self, *signals: signal.Signals):
        self.caught: signal.Signals | None = None
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether it is raised."""
        return self.caught is not None

    def __enter__(self) -> Flag:
        for each in self._signals:
            self._before[each] = signal.signal(each, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before.clear()

    def _raise(self, number: int, _: FrameType | None) -> None:
        self.caught = signal.Signals(number)
        self.__exit__()
