"""Signals such as Ctrl-C, caught as a flag or as `KeyboardInterrupt`.

An exception raised inside a compiled program can be swallowed there; a flag cannot.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


@contextlib.contextmanager
def interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Raise `KeyboardInterrupt` for these signals in a `with` block.

    That does not depend on SIGINT, which a shell has ignored in what it starts with `&`. A SIGHUP
    that is ignored (`nohup`) stays so.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before: dict[signal.Signals, Handler] = {}
    for each in signals:
        if each == signal.SIGTERM or signal.getsignal(each) is not signal.SIG_IGN:
            before[each] = signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


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
