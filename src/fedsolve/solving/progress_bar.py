"""The progress line that `solve` shows by default in terminals and notebooks."""

from __future__ import annotations

import html
import os
import sys
import time
from collections.abc import Callable

import jax

from fedsolve.runtimes.history import History

WAIT = 1.0  # seconds of a run before which nothing is shown
HIDDEN = "FEDSOLVE_PROGRESS"  # set to 0, nothing is shown


class Bar:
    """Shows round, objective, constraint and time left; `close` removes it.

    Args:
        show: Called with the line and the part that is done; with an empty line at the end.
    """

    def __init__(self, show: Callable[[str, float], None]):
        self._show, self._began, self._shown = show, time.perf_counter(), False
        self._first: int | None = None

    def __call__(self, done: int, rounds: int, newest: History) -> None:
        """Show the newest entries of the history."""
        seconds = time.perf_counter() - self._began
        if self._first is None:
            self._first = done  # after the compilation
            self._began = time.perf_counter() if not self._shown else self._began
            return
        if seconds < WAIT and not self._shown:
            return
        facts = [f"round {done}/{rounds}"]
        for letter, name in (("f", "objective"), ("g", "constraint")):
            if len(newest.get(name, ())):
                facts.append(f"{letter} {newest[name][-1]:.4g}")
        pace = seconds / max(done - self._first, 1)
        facts.append(f"{pace * (rounds - done):.0f} s left")
        self._shown = True
        self._show("  ".join(facts), done / rounds)

    def close(self) -> None:
        """Remove the line."""
        if self._shown:
            self._show("", 1.0)


def default_bar() -> Bar | None:
    """Return a bar if somebody looks: in a terminal or a notebook, in one process."""
    in_notebook, in_terminal = _in_notebook(), sys.stderr is not None and sys.stderr.isatty()
    if not (in_notebook or in_terminal) or os.environ.get(HIDDEN) == "0":
        return None
    if jax.process_index() != 0:
        return None
    return Bar(_notebook_line() if in_notebook else _terminal_line)


def _in_notebook() -> bool:
    """Return whether this runs in a Jupyter kernel."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _terminal_line(text: str, part: float) -> None:
    sys.stderr.write(f"\r\x1b[K{text}")
    sys.stderr.flush()


def _notebook_line() -> Callable[[str, float], None]:
    from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

    handles = []

    def show(text: str, part: float) -> None:
        bar = f'<progress value="{part:.3f}" max="1"></progress> {html.escape(text)}'
        shown = HTML(bar if text else "")
        if handles:
            handles[0].update(shown)
        else:
            handles.append(display(shown, display_id=True))

    return show
