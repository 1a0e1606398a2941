"""Links between pages, pictures and sections lead somewhere."""

import re
import unicodedata

import pytest

from tests.support.documents import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BUILT = {"docs/notebooks"}  # made when the docs are built


def slug(title):
    """The anchor that mkdocs gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
    ascii = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii).strip().lower())


def anchors(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = {slug(title) for title in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)}
    return found | {*re.findall(r'id="([^"]+)"', text)} | {*re.findall(r"\{ ?#([^ }]+)", text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if str(place.parent.relative_to(ROOT)) in BUILT:
            continue
        assert place.exists(), f"{page.name}: {target}"
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place), f"{page.name}: {target}"
