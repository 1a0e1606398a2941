"""PyTorch modules as problems; needs the extra `fedsolve[torch]`."""

try:
    import torch as _torch  # noqa: F401 (to say what is missing)
except ModuleNotFoundError as error:
    raise ImportError("fedsolve.torch needs PyTorch: install fedsolve[torch].") from error

from fedsolve.torch.problem import load, problem, state_dict
from fedsolve.torch.training import training

__all__ = ["load", "problem", "state_dict", "training"]
