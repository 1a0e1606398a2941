"""Docstrings of public names: complete, in Google style, with examples that run."""

import doctest
import inspect
import re

import pytest

from tests.support.public import public

PUBLIC = public()

# Base classes for others to derive from; an object of their own does nothing.
ABSTRACT = {
    "fedsolve.Algorithm",
    "fedsolve.Compressor",
    "fedsolve.Constraint",
    "fedsolve.Domain",
    "fedsolve.Optimizer",
    "fedsolve.Packet",
    "fedsolve.Participating",
    "fedsolve.SelectingTwice",
    "fedsolve.Switching",
    "fedsolve.algorithms.SelectingTwice",
    "fedsolve.games.Part",
    "fedsolve.models.Network",
    "fedsolve.participation.Availability",
    "fedsolve.participation.Selection",
    "fedsolve.participation.Weighting",
}

TITLES = r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$"


def sections(docstring):
    """The text of every section, by its title, without indentation."""
    _, *parts = re.split(TITLES, docstring, flags=re.MULTILINE)
    texts = [inspect.cleandoc(text) for text in parts[1::2]]
    return dict(zip(parts[::2], texts, strict=True))


def faults(name, thing):
    """What the docstring lacks, in words."""
    docstring = inspect.cleandoc(thing.__doc__ or "")
    summary, *rest = docstring.split("\n")
    found = []
    if not summary or summary[0].islower() or not summary.endswith("."):
        found.append(f"the first line is not a sentence: {summary!r}")
    if rest and rest[0].strip():
        found.append("no blank line after the first line")
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return found
    parts = sections(docstring)
    described = parts.get("Args", "") + "\n" + parts.get("Attributes", "")
    entries = re.findall(r"^([\w*, ]+?)(?: \(.*\))?:", described, re.MULTILINE)
    named = {word.strip(" *") for entry in entries for word in entry.split(",")}
    signature = inspect.signature(thing)
    found += [f"no argument {p}" for p in signature.parameters if p not in named]
    if inspect.isclass(thing):
        found += [] if name in ABSTRACT or ">>> " in example(parts) else ["no example"]
        return found
    if signature.return_annotation not in (None, "None", inspect.Signature.empty):
        found += [] if parts.keys() & {"Returns", "Yields"} else ["no section Returns"]
    return found + ([] if ">>> " in example(parts) else ["no example"])


def example(parts):
    return parts.get("Example", "") + parts.get("Examples", "")


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_docstring_is_complete(name):
    assert faults(name, PUBLIC[name]) == []


def examples():
    """The examples of public names and of their methods."""
    found = [
        test
        for name, thing in PUBLIC.items()
        for test in doctest.DocTestFinder().find(thing, name, module=False, globs={})
        if test.examples
    ]
    return [pytest.param(test, id=test.name) for test in found]


@pytest.mark.parametrize("test", examples())
def test_the_example_runs(test, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    told = []
    failed, _ = runner.run(test, out=told.append)
    assert not failed, "".join(told)
