"""Privacy of clients and defences of the server: what stands between answers and an algorithm."""

from fedsolve.privacy.exact import ExactSum
from fedsolve.privacy.private import Private
from fedsolve.privacy.robust import Clipped, Krum, Median, Trimmed
from fedsolve.privacy.secure import SecureSum

__all__ = ["Clipped", "ExactSum", "Krum", "Median", "Private", "SecureSum", "Trimmed"]
