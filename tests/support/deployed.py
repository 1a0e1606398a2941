"""Objects that a site's process builds by name."""

import fedsolve as fs
from tests.support.conformance import ALGORITHMS


def algorithm(name: str) -> fs.Algorithm:
    """An algorithm of the conformance list."""
    return ALGORITHMS[name]
