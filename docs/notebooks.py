"""Notebooks of tutorial pages: text and code as on the page, to be run in Jupyter.

`python docs/notebooks.py FOLDER` writes them; building the docs does so, too, into `notebooks/`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PAGES = ("start", "tutorials/problem", "tutorials/compression", "tutorials/bargain")
HERE = Path(__file__).parent


def notebook(text: str) -> dict[str, object]:
    """Return a page as a notebook: a cell for each block of Python, and for the text between."""
    cells: list[dict[str, object]] = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```\n?", text, flags=re.M | re.S)):
        if part.strip():
            lines = part.strip().splitlines(keepends=True)
            cell = {"id": f"cell-{number}", "metadata": {}, "source": lines}
            if number % 2:
                cells.append(cell | {"cell_type": "code", "execution_count": None, "outputs": []})
            else:
                cells.append(cell | {"cell_type": "markdown"})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    facts = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": facts, "nbformat": 4, "nbformat_minor": 5}


def write(folder: Path) -> list[Path]:
    """Write the notebooks of all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for page in PAGES:
        text = (HERE / f"{page}.md").read_text(encoding="utf-8")
        path = folder / f"{page.replace('/', '-')}.ipynb"
        path.write_text(json.dumps(notebook(text), indent=1) + "\n", encoding="utf-8")
        found.append(path)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks to the pages (a hook of mkdocs)."""
    from mkdocs.structure.files import File

    with tempfile.TemporaryDirectory() as folder:
        for path in write(Path(folder)):
            content = path.read_text(encoding="utf-8")
            files.append(File.generated(config, f"notebooks/{path.name}", content=content))
    return files


if __name__ == "__main__":
    write(Path(sys.argv[1]))
