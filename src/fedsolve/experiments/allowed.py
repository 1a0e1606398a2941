"""What a configuration may import: the registered names, and what this user has allowed.

To import a module is to run its code, so a configuration from elsewhere must not name one. A user
allows a problem, an algorithm or a part of another package by name, as `module:name`: for one
command with `--allow`, or for all commands in `fedsolve/config.toml` in the folder of the user's
settings (`$XDG_CONFIG_HOME`, by default `~/.config`):

    allow = ["clinic.models:survival"]
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fedsolve.errors import InvalidInput


class Allowed(NamedTuple):
    """What a configuration may import, and whether it may name files.

    Args:
        names: The `module:name`s that may be imported.
        files: Whether it may name files; one from another machine may not.
        builds: Whether anything is built at all; if not, nothing is imported, and the tables of
            other packages stay as they are.
    """

    names: frozenset[str] = frozenset()
    files: bool = True
    builds: bool = True

    def check(self, name: str, where: str) -> None:
        """Raise unless a `module:name` may be imported."""
        if name in self.names:
            return
        advice = f"; if you trust its code, allow it: --allow {name}" if self.files else ""
        raise InvalidInput(f"{where}: {name!r} is not on this machine's allow-list{advice}.")


def checked_names(names: object, where: str) -> list[str]:
    """Return a list of `module:name`s; raise if it is none."""
    listed = names if isinstance(names, Iterable) and not isinstance(names, str) else [names]
    found: list[str] = []
    for name in listed:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.]+:\w+", name):
            raise InvalidInput(f'{where} takes names such as "module:name", got {name!r}.')
        found.append(name)
    return found


def user_file() -> Path:
    """Return the path of the user's settings."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder, "fedsolve", "config.toml")


def allowed_here(names: object = ()) -> Allowed:
    """Return what this machine's user allows: the names, and those in the user's settings."""
    path = user_file()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInput(f"Cannot read {path}: {error}.") from error
    if unknown := table.keys() - {"allow"}:
        raise InvalidInput(f"{path}: there is no key {min(unknown)!r}; known: allow.")
    own = checked_names(table.get("allow", []), f"{path}: allow")
    return Allowed(frozenset([*own, *checked_names(names, "allow")]))
