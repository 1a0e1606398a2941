"""Categories that sites have, collected by adding up tables of numbers.

Every site adds its words to an invertible Bloom lookup table (Goodrich and Mitzenmacher, 2011): a
word is added to one cell of each of `TABLES` tables, as its bytes, a checksum and 1. Sums of such
cells are the cells of all sites together, and a cell with one word gives the word. So the sites'
sums are enough, and words come out with the number of clients that have them.

A client adds no word of fewer rows than its owner's `samples`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float

from fedsolve.errors import InvalidInput

MOST_WORDS = 64  # of a column, at all sites together
BYTES = 40  # of a word
TABLES, CELLS = 4, 128
WIDTH = 1 + BYTES + 1  # how many clients, the word's bytes, the checksum

Cells = Float[np.ndarray, "cells width"]


def words_of(name: str, texts: np.ndarray, samples: int) -> list[str]:
    """Return the words of a client's column that occur in enough rows, sorted."""
    counts = Counter(text for text in texts.tolist() if text)
    found = sorted(word for word, count in counts.items() if count >= samples)
    _check_few(name, found)
    for word in found:
        if len(word.encode()) > BYTES or "\0" in word:
            raise InvalidInput(
                f"The column {name!r} has {word[:BYTES]!r}…, and collected categories have at most "
                f"{BYTES} bytes; name the categories in the schema."
            )
    return found


def together(name: str, words: Iterable[str]) -> list[str]:
    """Return the words of all sites, sorted; raise if there are none, or too many."""
    found = sorted({*words})
    _check_few(name, found)
    if not found:
        raise InvalidInput(
            f"No site has a category in the column {name!r} with as many rows as its owner wants "
            "behind one (`limits.samples`)."
        )
    return found


def cells_of(words: Iterable[str]) -> Cells:
    """Return the table of a client's words."""
    found = np.zeros((TABLES * CELLS, WIDTH))
    for word in words:
        found[_places(word)] += _row(word)
    return found


def words_in_cells(name: str, cells: Cells, clients: int) -> list[str]:
    """Return the words in the sum of clients' tables, or in its part 1 / `clients`, sorted."""
    left = np.rint(cells * clients).astype(np.int64)
    found: dict[str, int] = {}
    while (there := np.flatnonzero(left[:, 0])).size:
        for place in there.tolist():
            count = int(left[place, 0])
            if (word := _alone(left[place])) is not None and place in _places(word):
                found[word] = found.get(word, 0) + count
                left[_places(word)] -= count * _row(word)
                break
        else:
            raise _too_many(name)
    if left.any():
        raise InvalidInput(f"What the sites sent of the column {name!r} is not a sum of words.")
    return together(name, found)


def _check_few(name: str, words: list[str]) -> None:
    if len(words) > MOST_WORDS:
        raise _too_many(name)


def _too_many(name: str) -> InvalidInput:
    return InvalidInput(
        f"The column {name!r} has more than {MOST_WORDS} different categories, so it is not "
        "collected; name its categories in the schema, or leave the column out."
    )


def _alone(cell: np.ndarray) -> str | None:
    """Return the word of a cell that has only one; None if it has several."""
    count = int(cell[0])
    if count < 0 or (cell % count).any():
        return None
    each = cell // count
    if (each[1:-1] < 0).any() or (each[1:-1] > 255).any():
        return None
    try:
        word = bytes(each[1:-1].tolist()).rstrip(b"\0").decode()
    except UnicodeDecodeError:
        return None
    return word if word and np.array_equal(_row(word), each) else None


def _row(word: str) -> np.ndarray:
    """Return what a word adds to a cell."""
    data = word.encode()
    check = int.from_bytes(_digest(word)[:3], "big")
    return np.array([1, *data, *[0] * (BYTES - len(data)), check], np.int64)


def _places(word: str) -> list[int]:
    """Return the cells of a word, one in each table."""
    digest = _digest(word)
    return [table * CELLS + digest[3 + table] % CELLS for table in range(TABLES)]


def _digest(word: str) -> bytes:
    return hashlib.sha256(f"fedsolve category {word}".encode()).digest()
