"""An extension of mkdocstrings: constructors of `equinox.Module` classes and named tuples.

Python makes their `__init__` from the fields, and static analysis does not see it. Parameters and
defaults are taken from the imported class, annotations from the source, where they can be linked.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import equinox as eqx
import griffe


class EquinoxFields(griffe.Extension):
    """Add the constructor to every class that has one made from its fields."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Visit all classes of the package, once all of it is loaded."""
        _visit(pkg, pkg)


def _visit(pkg: griffe.Module, module: griffe.Module) -> None:
    for member in list(module.members.values()):
        if isinstance(member, griffe.Module):
            _visit(pkg, member)
        elif isinstance(member, griffe.Class) and "__init__" not in member.members:
            _add_constructor(pkg, module, member)


def _add_constructor(pkg: griffe.Module, module: griffe.Module, found: griffe.Class) -> None:
    try:
        known = getattr(importlib.import_module(module.path), found.name)
    except (ImportError, AttributeError):  # an extra that is not installed
        return
    if not issubclass(known, eqx.Module | tuple):
        return
    parameters = [
        griffe.Parameter(
            name,
            annotation=_annotation(pkg, known, name),
            kind=getattr(griffe.ParameterKind, parameter.kind.name.lower()),
            default=_default(parameter.default),
        )
        for name, parameter in inspect.signature(known).parameters.items()
    ]
    this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    constructor = griffe.Function("__init__", parameters=griffe.Parameters(this, *parameters))
    constructor.parent = found
    found.set_member("__init__", constructor)


def _annotation(pkg: griffe.Module, known: type, field: str) -> str | griffe.Expr | None:
    """Return the annotation of a field, from the class or from the first base that has it."""
    for base in known.__mro__:
        if base.__module__.split(".")[0] == pkg.name:
            path = [*base.__module__.split(".")[1:], *base.__qualname__.split("."), field]
            try:
                found = pkg[path]
            except KeyError:
                continue
            if isinstance(found, griffe.Attribute):
                return found.annotation
    return None


def _default(value: object) -> str | None:
    if value is inspect.Parameter.empty:
        return None
    return getattr(value, "__qualname__", None) or repr(value)
