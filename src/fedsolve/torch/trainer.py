"""A training loop of the user's own, applied to one client at a time by PyTorch."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
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
from fedsolve.torch.verify import reason_of


class Trainer:
    """A training loop of the user's own, applied to one client. NumPy and PyTorch alone.

    Args:
        name: What the function is, for messages.
        train: The function of (module, data, key).
        network: The module.
        names: The parameters by name, in the order of the vector.
        shared: Those that are trained and sent; None for all.
        own: Those that are trained and stay on the client; None for none.
        changed: The buffers that are sent with them.
        datasets: The clients' Datasets, if they have any.
        like: One client's data as they were given: JAX narrows whole numbers, and they come back.
    """

    def __init__(
        self,
        name: str,
        train: Any,
        network: Network,
        names: Sequence[str],
        shared: Sequence[str] | None,
        own: Sequence[str] | None,
        changed: Sequence[str],
        datasets: Datasets | None,
        like: PyTree,
    ):
        if not callable(train):
            raise InvalidInput(f"{name} must be a function of (module, data, key), got {train!r}.")
        self.name, self.train, self.network = name, train, network
        self.names, self.shared = list(names), set(names if shared is None else shared)
        self.trained = self.shared | set(own or ())
        self.changed, self.datasets, self.like = tuple(changed), datasets, like
        self.draws = False  # whether it was seen to draw random numbers of PyTorch
        self._lock, self._unseeded = threading.Lock(), 0  # clients that run without a seed now
        self._common = torch.get_rng_state()  # PyTorch's state before the first of them

    def run(
        self,
        w: Host,
        data: PyTree,
        mask: Mask,
        order: PyTree,
        words: Host,
        state: PyTree,
        correction: dict[str, Host],
        corrected: bool = False,
    ) -> list[Host]:
        """Train one client.

        `seeded` makes every operator slower, so a loop that has drawn nothing yet runs without, and
        once more where that was wrong.

        Returns:
            The change of the parameters w_0 − w_E, the mean of the corrected gradients of its
            steps (the change, if there is no correction), and the buffers.
        """
        given = w, data, mask, order, words, state or {}, correction if corrected else None
        if not self.draws:
            with self._lock:
                if self._unseeded == 0:
                    self._common = torch.get_rng_state()
                self._unseeded += 1
            found = self._run(contextlib.nullcontext(), *given)
            with self._lock:
                self._unseeded -= 1
                if not self._common.equal(torch.get_rng_state()):
                    torch.set_rng_state(self._common)
                    self.draws = True
                if not self.draws:
                    return found
        return self._run(seeded(seed_of(words)), *given)

    def _run(
        self,
        randomness: contextlib.AbstractContextManager,
        w: Host,
        data: PyTree,
        mask: Mask,
        order: PyTree,
        words: Host,
        state: Mapping[str, Host],
        correction: Mapping[str, Host] | None,
    ) -> list[Host]:
        module, params = self._module(w, state)
        start = {name: p.detach().clone() for name, p in params.items()}
        directions = None
        corrections = None if correction is None else self._corrected(params, correction)
        with contextlib.ExitStack() as stack:
            if corrections is not None:
                stack.enter_context(corrections)
            stack.enter_context(randomness)
            stack.enter_context(torch.enable_grad())
            found = self.train(module, self._data(w.dtype, data, mask, order), seed_of(words))
            if corrections is not None:
                zeros = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
                directions = zeros | corrections.directions()
        trained: Any = module if found is None else found
        after = self._parameters(trained)
        change = _joined({name: start[name] - after[name].detach() for name in self.names})
        buffers = dict(trained.named_buffers())
        return [
            change.astype(w.dtype, copy=False),
            change if directions is None else _joined(directions),
            *(as_array(buffers[n]).astype(old.dtype) for n, old in sorted(state.items())),
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
                if name not in self.trained:
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

    def _data(self, dtype: np.dtype, data: PyTree, mask: Mask, order: PyTree) -> PyTree:
        """Return the client's data as its Dataset, or as tensors without padding."""
        if self.datasets is not None:
            return self.datasets.of(data, mask, order)
        real = real_samples(Samples(data, mask, order).gathered().values, mask)

        def tensor(array: Host, given: Host) -> torch.Tensor:
            return torch.from_numpy(
                np.array(array, dtype if given.dtype.kind == "f" else given.dtype)
            )

        seen = jax.tree.map(tensor, real, self.like)
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
        params = {name: p for name, p in params.items() if name in self.shared}
        return Corrected(params, parts, None if proximity is None else float(proximity))

    def check(self, params: Mapping[str, Host], one: Samples, buffers: str) -> None:
        """Train client 0 once; raise with a sentence if that cannot be right."""
        w = np.concatenate([np.ravel(params[name]) for name in self.names])
        w = w.astype(jax.dtypes.canonicalize_dtype(w.dtype))
        state = {name: self.network.buffers[name] for name in self.changed}
        words, seen = np.array([1, 2], np.uint32), _Watched(self)
        randomness, change = seeded(seed_of(words)), np.zeros(0)
        common = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        for attempt in range(2):  # what is imported on the way may use random numbers, once
            torch.set_rng_state(common[0])  # or a loop that sets a seed would find it set already
            np.random.set_state(common[1])  # noqa: NPY002
            random.setstate(common[2])
            randomness = seeded(seed_of(words))
            try:
                change, *_ = seen.run(randomness, w, one.values, one.mask, None, words, state, None)
            except InvalidInput:
                raise
            except Exception as error:
                reason = reason_of(error)
                raise InvalidInput(f"{self.name} failed on client 0's data: {reason}") from error
            if not seen.used:
                break
            if attempt:
                raise InvalidInput(
                    f"{self.name} uses the random state of {seen.used[0]} that all clients share, "
                    f"so runs could not be repeated; {RANDOM[seen.used[0]]}."
                )
        self.draws = randomness.drew
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
    """A trainer's single run, and what the user's function did besides."""

    def __init__(self, trainer: Trainer):
        self._trainer, self._found = copy.copy(trainer), {}
        self.used: list[str] = []  # common random states that it moved
        train = trainer.train

        def watched(module: torch.nn.Module, data: PyTree, key: int) -> PyTree:
            before = _common_randomness()
            returned = train(module, data, key)
            after = _common_randomness()
            self.used = [name for name in RANDOM if before[name] != after[name]]
            kept = module if returned is None else returned
            if isinstance(kept, torch.nn.Module):
                self._found = {n: as_array(b).copy() for n, b in kept.named_buffers()}
            return returned

        self._trainer.train = watched
        self.run = self._trainer._run

    def moved(self) -> set[str]:
        """Return the buffers that were changed."""
        old = self._trainer.network.buffers
        return {n for n, b in self._found.items() if n in old and not np.array_equal(old[n], b)}


RANDOM = {
    "PyTorch": "leave out torch.manual_seed, since PyTorch's numbers follow the run's seed here",
    "NumPy": "use np.random.default_rng(key)",
    "Python's random": "use random.Random(key)",
}


def _common_randomness() -> dict[str, bytes]:
    """Return the random states that all threads share."""
    legacy: Any = np.random.get_state(legacy=True)  # noqa: NPY002 (to see whether it moved)
    return {
        "PyTorch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": np.asarray(legacy[1]).tobytes() + repr(legacy[2:]).encode(),
        "Python's random": repr(random.getstate()).encode(),
    }


def _joined(parts: Mapping[str, torch.Tensor]) -> Host:
    return np.concatenate([as_array(part).ravel() for part in parts.values()])
