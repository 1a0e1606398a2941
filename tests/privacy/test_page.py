"""The examples of the page on privacy run as they are printed."""

import pytest

from tests.support.documents import blocks


def test_the_page_on_privacy_works():
    pytest.importorskip("dp_accounting")
    names = {}
    for block in blocks("docs/privacy.md"):
        exec(block, names)
        if "epsilon" in names.get("run", names["fs"]).__dict__.get("history", {}):
            assert 3.9 < names["run"].history["epsilon"][-1] <= 4.0
    assert names["margin"] > 0
    assert "epsilon" not in names["run"].history
