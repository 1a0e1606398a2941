"""Privacy of clients and defences of the server: what stands between answers and an algorithm."""

from fedsolve.privacy.private import Private
from fedsolve.privacy.robust import Clipped, Krum, Median, Trimmed

__all__ = ["Clipped", "Krum", "Median", "Private", "Trimmed"]
