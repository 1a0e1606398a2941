"""A training loop of the user's own, applied to one client at a time by PyTorch."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jaxtyping import PyTree

from fedsolve.errors import InvalidInput
from fedsolve.problem.samples import Mask, Samples
from fedsolve.torch.called import Host, real_samples, seed_of
from fedsolve.torch.corrections import Corrected
from fedsolve.torch.datasets import Datasets
from fedsolve.torch.module import Network, as_array
from fedsolve.torch.problem import ENTRY
from fedsolve.torch.randomness import seeded


class Trainer:
    """A training loop of the user's own, applied to one client. NumPy and PyTorch alone.

    Args:
        name: What the function is, for messages.
        train: The function of (module, data, key).
        network: The module.
        names: The parameters by name, in the order of the vector.
        trained: Those that are trained; None for all.
        changed: The buffers that are sent with them.
        datasets: The clients' Datasets, if they have any.
    """

    def __init__(
        self,
        name: str,
        train: Any,
        network: Network,
        names: Sequence[str],
        trained: Sequence[str] | None,
        changed: Sequence[str],
        datasets: Datasets | None,
    ):
        if not callable(train):
            raise InvalidInput(f"{name} must be a function of (module, data, key), got {train!r}.")
        self.name, self.train, self.network = name, train, network
        self.names, self.trained = list(names), None if trained is None else set(trained)
        self.changed, self.datasets = tuple(changed), datasets

    def run(
        self,
        w: Host,
        data: PyTree,
        mask: Mask,
        order: PyTree,
        words: Host,
        state: Any,
        correction: dict[str, Host],
        corrected: bool = False,
    ) -> list[Host]:
        """Train one client.

        Returns:
            The change of the parameters w_0 − w_E, the mean of the corrected gradients of its
            steps (the change, if there is no correction), and the buffers.
        """
        module, params = self._module(w, state or {})
        start = {name: p.detach().clone() for name, p in params.items()}
        seed, directions = seed_of(words), None
        with contextlib.ExitStack() as stack:
            if corrected:
                stack.enter_context(corrections := self._corrected(params, correction))
            stack.enter_context(seeded(seed))
            stack.enter_context(torch.enable_grad())
            found = self.train(module, self._data(w.dtype, data, mask, order), seed)
            if corrected:
                directions = corrections.directions()
        after = self._parameters(module if found is None else found)
        change = _joined({name: start[name] - after[name].detach() for name in self.names})
        buffers = dict((module if found is None else found).named_buffers())
        return [
            change.astype(w.dtype, copy=False),
            change if directions is None else _joined({n: directions[n] for n in self.names}),
            *(as_array(buffers[name]).copy() for name in sorted(state or {})),
        ]

    def _module(
        self, w: Host, state: Mapping[str, Host]
    ) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
        """Return a fresh copy of the module, with parameters at w and these buffers."""
        module = self.network.fresh(torch.from_numpy(np.empty(0, w.dtype)).dtype, True)
        params, buffers = self._parameters(module), dict(module.named_buffers())
        ends = np.cumsum([params[name].numel() for name in self.names])[:-1]
        with torch.no_grad():
            for name, part in zip(self.names, np.split(w, ends), strict=True):
                params[name].copy_(torch.from_numpy(np.array(part)).view(params[name].shape))
                if self.trained is not None and name not in self.trained:
                    params[name].requires_grad_(False)
            for name, array in state.items():
                buffers[name].copy_(torch.from_numpy(np.array(array)))
        return module, params

    def _parameters(self, module: object) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are sent; raise if it is another kind of module."""
        if not isinstance(module, torch.nn.Module):
            raise InvalidInput(
                f"{self.name} must train the module that it is given, or return the trained one, "
                f"got {type(module).__name__}."
            )
        found = dict(module.named_parameters())
        shapes = {name: tuple(found[name].shape) for name in self.names if name in found}
        if shapes != {name: self.network.params[name].shape for name in self.names}:
            raise InvalidInput(
                f"{self.name} returns a module whose parameters differ in name or shape from those "
                "of the given one."
            )
        return {name: found[name] for name in self.names}

    def _data(self, dtype: np.dtype, data: PyTree, mask: Mask, order: PyTree) -> Any:
        """Return the client's data as its Dataset, or as tensors without padding."""
        if self.datasets is not None:
            return self.datasets.of(data, mask, order)
        real = real_samples(Samples(data, mask, order).gathered().values, mask)

        def tensor(array: Host) -> torch.Tensor:
            return torch.from_numpy(np.array(array, dtype if array.dtype.kind == "f" else None))

        seen = jax.tree.map(tensor, real)
        return seen[ENTRY] if isinstance(seen, dict) and list(seen) == [ENTRY] else seen

    def _corrected(
        self, params: Mapping[str, torch.nn.Parameter], correction: Mapping[str, Host]
    ) -> Corrected:
        shift, proximity = correction.get("shift"), correction.get("proximity")
        parts = None
        if shift is not None:
            sizes = [params[name].numel() for name in self.names]
            split = torch.from_numpy(np.array(shift)).split(sizes)
            parts = {n: s.view(params[n].shape) for n, s in zip(self.names, split, strict=True)}
        if self.trained is not None:
            params = {name: p for name, p in params.items() if name in self.trained}
        return Corrected(params, parts, None if proximity is None else float(proximity))

    def check(self, params: Mapping[str, Host], one: Samples, buffers: str) -> None:
        """Train client 0 once; raise with a sentence if that cannot be right."""
        w = np.concatenate([np.ravel(params[name]) for name in self.names])
        w = w.astype(jax.dtypes.canonicalize_dtype(w.dtype))
        before, state = _common_randomness(), {n: self.network.buffers[n] for n in self.changed}
        words = np.array([1, 2], np.uint32)
        seen = _Watched(self)
        try:
            change, *_ = seen.run(w, one.values, one.mask, None, words, state, {})
        except InvalidInput:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InvalidInput(f"{self.name} failed on client 0's data: {reason}") from error
        for (library, advice), old, new in zip(
            RANDOM.items(), before, _common_randomness(), strict=True
        ):
            if old != new:
                raise InvalidInput(
                    f"{self.name} uses the random state of {library} that all clients share, so "
                    f"runs could not be repeated; {advice}."
                )
        moved = seen.moved() - set(self.changed)
        if moved and buffers != "frozen":
            raise InvalidInput(
                f"{self.name} changes the buffers {', '.join(sorted(moved))}, which the loss does "
                'not: put these layers in .eval() mode, or give buffers="frozen".'
            )
        if self.name == "train" and not np.any(change):
            raise InvalidInput(
                "train left the module's parameters as they were; it must train the module that it "
                "is given, or return the trained one."
            )


class _Watched:
    """A trainer's single run, after which its module's buffers can be compared."""

    def __init__(self, trainer: Trainer):
        self._trainer, self._found = copy.copy(trainer), {}
        train = trainer.train

        def watched(module: torch.nn.Module, data: Any, key: int) -> Any:
            returned = train(module, data, key)
            kept = module if returned is None else returned
            if isinstance(kept, torch.nn.Module):
                self._found = {n: as_array(b).copy() for n, b in kept.named_buffers()}
            return returned

        self._trainer.train = watched
        self.run = self._trainer.run

    def moved(self) -> set[str]:
        """Return the buffers that were changed."""
        old = self._trainer.network.buffers
        return {n for n, b in self._found.items() if n in old and not np.array_equal(old[n], b)}


RANDOM = {
    "PyTorch": "leave out torch.manual_seed, since PyTorch's numbers follow the run's seed here",
    "NumPy": "use np.random.default_rng(key)",
    "Python's random": "use random.Random(key)",
}


def _common_randomness() -> list[bytes]:
    """Return the random states that all threads share."""
    legacy = np.random.get_state(legacy=True)  # noqa: NPY002 (to see whether it moved)
    return [
        torch.get_rng_state().numpy().tobytes(),
        np.asarray(legacy[1]).tobytes() + repr(legacy[2:]).encode(),
        repr(random.getstate()).encode(),
    ]


def _joined(parts: Mapping[str, torch.Tensor]) -> Host:
    return np.concatenate([as_array(part).ravel() for part in parts.values()])
