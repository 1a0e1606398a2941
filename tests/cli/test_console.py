"""What commands print fits 80 columns without losing a number."""

import dataclasses

from rich.console import Console

import fedsolve as fs
from fedsolve.cli.console import closing_table
from fedsolve.runtimes.history import History
from tests.support import examples


def printed(runs):
    console = Console(width=80)
    with console.capture() as captured:
        console.print(closing_table(runs))
    return captured.get()


def test_the_closing_table_keeps_every_number_in_80_columns():
    run = fs.solve(examples.least_squares(), fs.FedSGM(0.01, 0.05), rounds=3)
    history = History(run.history)
    history |= {
        "bytes_up_total": run.history["bytes_up_total"] * 0 + 999_900,
        "bytes_down_total": run.history["bytes_down_total"] * 0 + 100,
    }
    run = dataclasses.replace(run, history=history, seconds=12345.67, seed=1234)
    one = printed({"": [run]})
    several = printed({"hard switching, Top-K of 10 % both ways": [run], "soft": [run, run]})
    f, g = (f"{run.history[name][-1]:.5g}" for name in ("objective", "constraint"))
    for text in (one, several):
        assert "…" not in text
        assert all(len(line) <= 80 for line in text.splitlines())
        for number in ("1234", f, g, "12345.67 s"):
            assert number in text
    assert "999.9 kB" in one
    assert "1.0 MB" in several  # up and down together
    words = several.split()
    assert {"hard", "switching,", "Top-K", "both", "ways"} <= {*words}
