"""Tables of results as texts: in a terminal, in LaTeX."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a slow import
    from pandas import DataFrame

SPECIAL = str.maketrans({c: f"\\{c}" for c in "_%&#$"})


def whole(frame: DataFrame) -> DataFrame:
    """Return the table as one whose text has every column, wrapped where a line is full."""
    import pandas as pd

    class Whole(pd.DataFrame):
        """A table that is printed whole."""

        def __repr__(self) -> str:
            return self.to_string(line_width=shutil.get_terminal_size().columns)

        def _repr_html_(self) -> str:
            return self.to_html(index=False, float_format="{:.6g}".format)

    return Whole(frame)


def latex_table(table: DataFrame, columns: Sequence[str], digits: int) -> str:
    """Return some columns of a table in LaTeX, with `booktabs`."""
    kinds = "".join("r" if table[name].dtype.kind in "if" else "l" for name in columns)
    head = " & ".join(str(name).translate(SPECIAL) for name in columns)
    rows = [
        " & ".join(
            f"{v:.{digits}g}" if isinstance(v, float) else str(v).translate(SPECIAL) for v in row
        )
        for row in table[list(columns)].itertuples(index=False)
    ]
    lines = [f"\\begin{{tabular}}{{{kinds}}}", r"\toprule", rf"{head} \\", r"\midrule"]
    lines += [*(rf"{row} \\" for row in rows), r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"
