"""The API reference: every public name on exactly one page, and every entry exists."""

import importlib
import pkgutil
import re
from collections import Counter

import pytest

from tests.support.documents import ROOT
from tests.support.public import EXTRAS, key, public

PAGES = sorted((ROOT / "docs/api").glob("*.md"))


def entries():
    """Pairs of a page's name and an identifier that mkdocstrings documents there."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found += [(page.stem, name) for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)]
    return found


def is_installed(name):
    """Whether the package that has this name can be imported."""
    extra = next((extra for extra in EXTRAS if name.startswith(extra + ".")), None)
    try:
        return extra is None or bool(importlib.import_module(extra))
    except ImportError:
        return False


INSTALLED = [(page, name) for page, name in entries() if is_installed(name)]


@pytest.mark.parametrize(("page", "name"), INSTALLED)
def test_every_entry_is_a_function_or_a_class(page, name):
    thing = pkgutil.resolve_name(name)
    assert callable(thing), f"docs/api/{page}.md: {name} is {thing!r}; write the path of its module"


def test_every_public_name_is_on_one_page():
    times = Counter(key(pkgutil.resolve_name(name)) for _, name in INSTALLED)
    assert [name for name, thing in public().items() if key(thing) not in times] == []
    assert [name for name, count in times.items() if count > 1] == []


def test_the_overview_links_every_page():
    overview = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    linked = re.findall(r"\(api/([\w-]+)\.md\)", overview)
    assert sorted(linked) == [page.stem for page in PAGES]
