"""PyTorch's operators in JAX, by kind; importing this package fills the table."""

from fedsolve.torch.operators import (
    convolution,
    elementwise,
    normalisation,
    products,
    random,
    recurrent,
    reductions,
    shapes,
)
from fedsolve.torch.operators.table import NAMED, Last, Operator, find, first

__all__ = [
    "NAMED",
    "Last",
    "Operator",
    "convolution",
    "elementwise",
    "find",
    "first",
    "normalisation",
    "products",
    "random",
    "recurrent",
    "reductions",
    "shapes",
]
