"""`--tiny` on any script: its smallest setting, to see that it runs to its end.

    python benchmarks/games.py --tiny

The numbers mean nothing then. `tests/docs/test_benchmarks.py` runs every script like this.
"""

import os
import sys
from typing import TypeVar

Setting = TypeVar("Setting")

TINY = "--tiny" in sys.argv or os.environ.get("TINY") == "1"
if TINY:
    os.environ["TINY"] = "1"  # for processes that a script starts
    sys.argv = [word for word in sys.argv if word != "--tiny"]


def tiny(full: Setting, small: Setting) -> Setting:
    """The full setting, or the small one if asked for."""
    return small if TINY else full
