"""PyTorch modules as problems; needs the extra `fedsolve[torch]`."""

from fedsolve.torch.problem import load, problem

__all__ = ["load", "problem"]
