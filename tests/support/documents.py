"""Code blocks of the documents."""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(name, language="python"):
    """A page's blocks of code in that language; they may stand in a list."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in found]
