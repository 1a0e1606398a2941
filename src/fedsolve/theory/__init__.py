"""What the papers' theorems ask for and promise."""

from fedsolve.theory import fedadmm

__all__ = ["fedadmm"]
