"""The notebooks are those of the pages, and run from start to end in a Jupyter kernel."""

import importlib.util
import json

import pytest

from tests.support.documents import ROOT, blocks

spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs/notebooks.py")
assert spec is not None
assert spec.loader is not None
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)


def test_cells_are_the_blocks_of_the_page(tmp_path):
    for page, path in zip(notebooks.PAGES, notebooks.write(tmp_path), strict=True):
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        assert code == [block.strip() for block in blocks(f"docs/{page}.md")]
        listed = (ROOT / "docs/notebooks.md").read_text(encoding="utf-8")
        assert f"notebooks/{path.name}" in listed


@pytest.mark.slow  # a kernel for each
@pytest.mark.parametrize("page", notebooks.PAGES)
def test_notebooks_run(page, tmp_path):
    nbclient, nbformat = (pytest.importorskip(name) for name in ("nbclient", "nbformat"))
    pytest.importorskip("ipykernel")
    text = json.dumps(notebooks.notebook((ROOT / f"docs/{page}.md").read_text(encoding="utf-8")))
    book = nbformat.reads(text, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, resources=resources).execute()
    outputs = [out for cell in book.cells for out in cell.get("outputs", [])]
    assert outputs
    assert all(out["output_type"] != "error" for out in outputs)
