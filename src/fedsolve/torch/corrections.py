"""Corrections of the steps that an optimizer of PyTorch takes in a user's training loop.

SCAFFOLD, FedProx and FedDyn add something to the gradient of each local step. In a loop that the
user wrote this is done before each `step()` of an optimizer, so it works with any of them, with
gradients that are accumulated over several batches, and with clipping (which comes first).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedsolve.errors import InvalidInput

_active = threading.local()  # the corrections of the module that this thread trains


class Corrected:
    """Add shift + proximity · (v − w) to the gradients of each step; a context manager.

    Args:
        parameters: The parameters, at w.
        shift: What is added, by parameter; None for nothing.
        proximity: The weight of v − w; None for 0.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        shift: Mapping[str, torch.Tensor] | None,
        proximity: float | None,
    ):
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._start = {name: p.detach().clone() for name, p in parameters.items()}
        self._shift, self._proximity = shift, proximity
        self._sums = {name: torch.zeros_like(p) for name, p in self._start.items()}
        self._steps = dict.fromkeys(self._start, 0)
        _register()

    def __enter__(self) -> Corrected:
        _active.corrected = self
        return self

    def __exit__(self, *_: object) -> None:
        _active.corrected = None

    def directions(self) -> dict[str, torch.Tensor]:
        """Return the mean of each parameter's corrected gradients; raise if there was no step."""
        if not any(self._steps.values()):
            raise InvalidInput(
                "The algorithm corrects each local step, and train took no step of a torch.optim "
                "optimizer; use one, or an algorithm without corrections (FedAvg)."
            )
        return {name: total / max(self._steps[name], 1) for name, total in self._sums.items()}

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Correct the gradients that the optimizer will use."""
        if kwargs.get("closure") is not None or any(map(callable, args)):
            raise InvalidInput(
                "The algorithm corrects each local step, which it cannot do in an optimizer that "
                "computes gradients itself (a closure, as in LBFGS)."
            )
        with torch.no_grad():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                name = self._names.get(id(parameter))
                if name is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if self._shift is not None:
                    parameter.grad += self._shift[name]
                if self._proximity is not None:
                    parameter.grad += self._proximity * (parameter - self._start[name])
                self._sums[name] += parameter.grad
                self._steps[name] += 1


@functools.cache
def _register() -> None:
    """Have PyTorch call `_before_step`, in every thread."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    corrected = getattr(_active, "corrected", None)
    if corrected is not None:
        corrected.before_step(optimizer, args, kwargs)
