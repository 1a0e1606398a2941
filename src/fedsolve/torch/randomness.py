"""Random numbers of PyTorch that follow a seed in one thread, whoever draws them.

PyTorch has one generator for all threads, so clients that draw from it at the same time would get
other numbers in every run. Inside `seeded` every random operator of this thread (dropout, the order
of a `DataLoader`, `torch.rand` in an augmentation) is given a generator of its own instead, and the
common one is neither read nor moved. An operator that was given a generator by the user keeps it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedsolve.errors import InvalidInput

RANDOM = torch.Tag.nondeterministic_seeded


class seeded(TorchDispatchMode):
    """Let the random operators of this thread follow a seed; a context manager.

    Args:
        seed: The seed, a whole number of at most 64 bits.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._seed = seed
        self.drew = False  # whether a random operator was run
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, with a generator if it is a random one."""
        kwargs = kwargs or {}
        if RANDOM not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        names = [argument.name for argument in arguments]
        given = {argument.name: argument.default_value for argument in arguments}
        given |= dict(zip(names, args, strict=False)) | kwargs
        if given.get("dropout_p") == 0:  # attention without dropout
            return func(*args, **kwargs)
        self.drew = True
        drawing = func if "generator" in names else _with_generator(func)
        if drawing is not None:
            return drawing(*args, **kwargs | {"generator": self._generator(given)})
        with self:  # a composition of other operators, where PyTorch did not take it apart
            native = func is torch.ops.aten.native_dropout.default
            found = (_native_dropout if native else func.decompose)(*args, **kwargs)
        if found is NotImplemented:
            raise InvalidInput(
                f"The module draws random numbers by {func}, which takes no torch.Generator, so "
                "they cannot follow the run's seed."
            )
        return found

    def _generator(self, given: Any) -> torch.Generator:
        """Return this thread's generator on the device of an operator's arguments."""
        tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device(given.get("device") or "cpu")
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def _native_dropout(x: torch.Tensor, rate: float, training: bool | None) -> Any:
    """Compute PyTorch's operator of this name by one that takes a generator."""
    kept = torch.ones_like(x, dtype=torch.bool)
    if training is False:
        return x.clone(), kept
    kept.bernoulli_(1 - rate)
    return x * kept / max(1 - rate, torch.finfo(x.dtype).tiny), kept


def _with_generator(func: Any) -> Any:
    """Return the operator that takes the same arguments and a generator; None if there is none."""

    def form(arguments: Any) -> Any:
        return [(a.name, str(a.type)) for a in arguments if a.name != "generator"]

    packet = func.overloadpacket
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        takes_one = any(argument.name == "generator" for argument in arguments)
        if takes_one and form(arguments) == form(func._schema.arguments):
            return getattr(packet, overload)
    return None
