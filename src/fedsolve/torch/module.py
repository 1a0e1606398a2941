"""The user's module: parameters, buffers and modes, as they were when the problem was made."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Shaped

from fedsolve.errors import InvalidInput

Arrays = dict[str, Shaped[np.ndarray, "..."]]
Names = dict[str, str]


class Network:
    """A copy of the user's module, which may be had in any precision, for training or evaluation.

    In training every submodule is in the mode that it was given in, so what the user froze by
    `eval()` stays so. A module that is in evaluation mode as a whole is trained like that.

    Args:
        module: The user's module, which is never changed.

    Raises:
        InvalidInput: If it has no parameters that require a gradient.
    """

    def __init__(self, module: torch.nn.Module):
        named = dict(module.named_parameters())
        self.trainable = frozenset(name for name, p in named.items() if p.requires_grad)
        if not self.trainable:
            raise InvalidInput("The module has no parameters that require a gradient.")
        self.params: Arrays = {name: as_array(named[name]).copy() for name in sorted(named)}
        buffers = dict(module.named_buffers())
        self.buffers: Arrays = {name: as_array(buffers[name]).copy() for name in sorted(buffers)}
        self.lock = threading.RLock()  # JAX may trace in several threads
        self._module = copy.deepcopy(module)
        self._modes = {name: part.training for name, part in module.named_modules()}
        self._copies: dict[torch.dtype, torch.nn.Module] = {}

    @property
    def trains(self) -> bool:
        """Whether training differs from evaluation in the mode of some submodule."""
        return self._modes[""]

    def fresh(self, dtype: torch.dtype, training: bool) -> torch.nn.Module:
        """Return another copy, in this precision and mode."""
        return self._in_mode(copy.deepcopy(self._module).to(dtype), training)

    def at(self, dtype: torch.dtype, training: bool) -> torch.nn.Module:
        """Return the copy to trace, in this precision and mode; hold the lock meanwhile."""
        if dtype not in self._copies:
            self._copies[dtype] = copy.deepcopy(self._module).to(dtype)
        return self._in_mode(self._copies[dtype], training)

    def _in_mode(self, module: torch.nn.Module, training: bool) -> torch.nn.Module:
        training = training and self.trains
        for name, part in module.named_modules():
            part.training = training and self._modes[name]
        return module


def as_state(array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """Return a buffer as part of a problem's state: whole numbers in 32 bits, where they fit.

    JAX may be set to 64 bits in one thread and not in another, so they would not stay 64 bits.
    """
    narrow = np.dtype(np.int32)
    if array.dtype != np.int64 or np.any(np.abs(array) > np.iinfo(narrow).max):
        return array
    return array.astype(narrow)


def first_names(module: torch.nn.Module) -> Names:
    """Return, for each name of a parameter or buffer, the first name of the same tensor."""
    seen: dict[int, str] = {}
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: seen.setdefault(id(tensor), name) for name, tensor in named}


def as_array(tensor: torch.Tensor) -> Shaped[np.ndarray, "..."]:
    """Return a tensor as a NumPy array."""
    return tensor.detach().cpu().numpy()


def as_tensors(arrays: Mapping[str, Shaped[np.ndarray, "..."]]) -> dict[str, torch.Tensor]:
    """Return arrays as tensors that own their memory."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
