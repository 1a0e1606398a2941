"""The tutorial on PyTorch works as it is printed."""

import os
import sys

import pytest

from tests.support.documents import blocks
from tests.support.examples import needs_data

pytest.importorskip("torch")


@pytest.mark.slow
@needs_data("cifar10")
def test_the_tutorial_on_pytorch_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    (experiment,) = (block for block in blocks("docs/tutorials/torch.md", "toml"))
    (tmp_path / "images.toml").write_text(experiment, encoding="utf-8")
    names = {}
    for block in blocks("docs/tutorials/torch.md"):
        if block.startswith("# images.py"):
            (tmp_path / "images.py").write_text(block, encoding="utf-8")
        else:
            exec(block, names)
    sys.modules.pop("images", None)
