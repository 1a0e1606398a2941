"""Signals such as Ctrl-C, caught as a flag.

An exception raised inside a compiled program can be swallowed there; a flag cannot.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class Flag:
    """Catches signals in a `with` block: the first one sets the flag, a second one acts as usual.

    In a thread, where signals cannot be caught, nothing is changed.
    """

    def __init__(self, *signals: signal.Signals):
        self.caught: signal.Signals | None = None
        self._signals = signals if threading.current_thread() is threading.main_thread() else ()
        self._before: dict[signal.Signals, Handler] = {}

    def __call__(self) -> bool:
        """Return whether a signal was caught."""
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
