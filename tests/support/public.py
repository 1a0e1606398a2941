"""The public names of Fedsolve: what `__all__` of its public packages lists."""

import importlib
import inspect
import types

PACKAGES = (
    "fedsolve",
    "fedsolve.algorithms",
    "fedsolve.compression",
    "fedsolve.constraints",
    "fedsolve.data",
    "fedsolve.errors",
    "fedsolve.experiments",
    "fedsolve.games",
    "fedsolve.local_updates",
    "fedsolve.models",
    "fedsolve.nnx",
    "fedsolve.participation",
    "fedsolve.privacy",
    "fedsolve.problem",
    "fedsolve.problems",
    "fedsolve.theory",
    "fedsolve.torch",
)
EXTRAS = ("fedsolve.nnx", "fedsolve.torch")  # may not be installed


def key(thing):
    """Where a function or a class is defined, which is its identity."""
    return f"{thing.__module__}.{thing.__qualname__}"


def public():
    """Public functions and classes by their shortest public name: `fedsolve.solve`, ..."""
    found = {}
    for package in PACKAGES:
        try:
            _collect(importlib.import_module(package), package, found)
        except ImportError:
            if package not in EXTRAS:
                raise
    names = {}
    for name, thing in sorted(found.items(), key=lambda item: (item[0].count("."), item[0])):
        names.setdefault(key(thing), (name, thing))
    return dict(sorted(names.values(), key=lambda pair: pair[0]))


def _collect(module, path, found):
    for name in getattr(module, "__all__", ()):
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            found[f"{path}.{name}"] = thing
        elif isinstance(thing, types.ModuleType) and f"fedsolve.{name}" not in PACKAGES:
            _collect(thing, f"{path}.{name}", found)
