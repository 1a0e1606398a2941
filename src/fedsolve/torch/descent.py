"""An objective that PyTorch computes, whose local steps of gradient descent are one call."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import PyTree

from fedsolve.problem.constraints import Constraint
from fedsolve.problem.local_pass import LocalWork, Walked
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import Mask, Samples
from fedsolve.problem.several import Parts, constraint_of
from fedsolve.torch.callback import call
from fedsolve.torch.called import (
    Called,
    Copies,
    Form,
    Host,
    Loss,
    Metric,
    Value,
    buffers_of,
    real_samples,
    words_of,
)
from fedsolve.torch.module import Network, as_state
from fedsolve.torch.named import check_no_named
from fedsolve.torch.pool import Clients
from fedsolve.types import Function


class Objective(Loss):
    """An objective of (params, data, ...) in JAX, computed by PyTorch.

    Args:
        called: The user's function.
        form: What the objective takes and returns.
    """

    trains_itself: ClassVar[bool] = False

    def __init__(self, called: Called, form: Form):
        super().__init__(called, form)
        self.called: Called = called
        self._walks: dict[Any, Clients] = {}

    def local_pass(self, work: LocalWork) -> Walked | None:
        """Take steps of gradient descent; None for other steps."""
        follows = work.follows
        if work.step_size is None or follows is None or follows.sigma is not None:
            return None
        if work.trained is not None:  # some parameters are fixed by the problem
            return None
        batches = work.batches()
        samples = work.samples if batches.rows is not None else work.samples.gathered()
        which = batches.steps, batches.epochs, batches.size, batches.drop_last
        if which not in self._walks:
            self._walks[which] = Clients(_Walk(self.called, *which))
        words = jax.vmap(words_of)(batches.keys) if self.form.is_random else None
        number = lambda x: None if x is None else jnp.asarray(x, work.w.dtype)  # noqa: E731
        leaves, structure = jax.tree.flatten(samples.state)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (work.w, *leaves)]
        total, *state = call(
            self._walks[which],
            shapes,
            work.w,
            samples.values,
            samples.mask,
            batches.rows,
            words,
            samples.state,
            number(work.step_size),
            follows.shift,
            number(follows.proximity),
        )
        return Walked(total, total, structure.unflatten(state))


class _Walk:
    """The steps of one client. It uses NumPy and PyTorch alone, as JAX waits for it."""

    def __init__(self, called: Called, steps: int | None, epochs: int, size: int, drop_last: bool):
        self.called, self.steps, self.epochs = called, steps, epochs
        self.size, self.drop_last = size, drop_last

    def __call__(
        self,
        w: Host,
        data: PyTree,
        mask: Mask,
        rows: PyTree,
        words: Host | None,
        state: PyTree,
        step_size: Host,
        shift: Host | None,
        proximity: Host | None,
    ) -> list[Host]:
        """Return the sum of the directions, and the buffers after the last step."""
        called = self.called
        copy = called.copies.at(w, words is not None, state)
        total = torch.zeros_like(copy.vector)
        sizes = [param.numel() for param in copy.params]
        parts = [
            part.view(param.shape)
            for part, param in zip(total.split(sizes), copy.params, strict=True)
        ]
        start = copy.vector.clone()
        added = None if shift is None else torch.from_numpy(np.array(shift)).to(start.device)
        whole = called.tensors(w.dtype, data if rows is not None else real_samples(data, mask))
        with torch.enable_grad():
            for step, batch in enumerate(self._batches(whole, mask, rows)):
                if step:
                    torch.sub(start, total, alpha=float(step_size), out=copy.vector)
                value = called.on(copy, batch, None if words is None else words[step])
                slopes = torch.autograd.grad(value, copy.params, materialize_grads=True)
                with torch.no_grad():
                    moved = None if proximity is None else (copy.vector - start) * float(proximity)
                    for part, slope in zip(parts, slopes, strict=True):
                        part += slope
                    if added is not None:
                        total += added
                    if moved is not None:
                        total += moved
        return [total.cpu().numpy(), *buffers_of(copy, state)]

    def _batches(self, whole: PyTree, mask: Mask, rows: PyTree) -> Iterator[PyTree]:
        """Return the minibatch of each step."""
        if rows is None:
            for _ in range(self.steps or 0):
                yield whole
        elif self.steps is not None:
            index = jax.tree.map(lambda leaf: torch.from_numpy(np.array(leaf)).long(), rows)
            for step in range(self.steps):
                yield jax.tree.map(lambda leaf, own, s=step: leaf[own[s]], whole, index)
        else:
            count = rows.shape[1] if mask is None else int(np.sum(mask))
            last = count // self.size * self.size if self.drop_last else count
            for order in torch.from_numpy(np.array(rows)).long()[:, :count]:
                for first in range(0, last, self.size):
                    own = order[first : min(first + self.size, count)]
                    yield jax.tree.map(
                        lambda leaf, own=own, n=rows.shape[1]: (
                            leaf[own] if leaf.ndim and len(leaf) == n else leaf
                        ),
                        whole,
                    )


def callback_problem(
    module: torch.nn.Module,
    loss: Function,
    constraint: Constraint | Function | Parts | None,
    samples: Samples,
    entry: str | None,
    test: PyTree,
    metrics: Mapping[str, Function] | None,
    options: Mapping[str, Any],
    smooth: bool = True,
) -> Problem:
    """Make a problem whose functions of (module, data) PyTorch computes.

    Args:
        module: The module.
        loss: The objective.
        constraint: The constraint.
        samples: All clients' samples.
        entry: The entry of the data that functions are given; None for all of them.
        test: Data for the metrics.
        metrics: Functions of (module, test), by name.
        options: Other arguments of `Problem`.
        smooth: Whether the objective and the constraint must have a gradient.
    """
    check_no_named(constraint)
    copies = Copies(Network(module))
    local: list[Called] = []

    def called(name: str, function: Function, sums: bool = False) -> Called:
        local.append(Called(name, function, copies, samples, entry, smooth))
        local[-1].returned  # noqa: B018 (runs the function on all clients' data)
        return local[-1]

    objective = called("loss", loss)
    if constraint is not None:
        constraint = constraint_of(constraint).adapt(functools.partial(called, "constraint"))
    differs, changed = zip(*(each.in_training() for each in local), strict=True)
    form = Form(any(differs), changed[0])
    if constraint is not None:
        constraint = constraint.adapt(lambda function, sums=False: Value(function, form))
    whole = Samples(jax.tree.map(lambda leaf: leaf[None], test))
    found = {
        name: Metric(Called(f"metric {name!r}", metric, copies, whole, smooth=False), form)
        for name, metric in (metrics or {}).items()
    }
    if form.changed:
        options = {"state": {n: as_state(copies.network.buffers[n]) for n in form.changed}} | {
            **options
        }
    return Problem(
        objective=Objective(objective, form),
        clients=samples,
        params=copies.params,
        constraint=constraint,
        test=test,
        metrics=found,
        **options,
    )
