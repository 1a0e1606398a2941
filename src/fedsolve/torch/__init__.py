"""PyTorch modules as problems."""

from fedsolve.torch.problem import load, problem

__all__ = ["load", "problem"]
