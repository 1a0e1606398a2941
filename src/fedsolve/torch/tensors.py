"""From NumPy to PyTorch and back."""

from __future__ import annotations

import jax
import numpy as np
import torch
from jaxtyping import PyTree
from numpy.typing import ArrayLike

from fedsolve.problem.samples import Mask, has_rows


def trainable(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the module's parameters that require a gradient, by name."""
    return {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}


def as_array(leaf: torch.Tensor | ArrayLike) -> np.ndarray:
    """Return an array or tensor as a NumPy array."""
    return leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)


def as_tensor(array: np.ndarray, kind: np.dtype, device: torch.device) -> torch.Tensor:
    """Return a copy as a tensor, floating-point numbers in the type `kind`.

    It is a copy since PyTorch must not write to JAX's memory.
    """
    kind = kind if array.dtype.kind == "f" else array.dtype
    return torch.from_numpy(np.array(array, kind)).to(device)


def real_samples(data: PyTree, mask: Mask) -> PyTree:
    """Return one client's samples without padding."""
    if isinstance(mask, dict):
        return {name: real_samples(entry, mask[name]) for name, entry in data.items()}
    if mask is None:
        return data
    rows = mask.astype(bool)
    return jax.tree.map(lambda leaf: leaf[rows] if has_rows(leaf, rows) else leaf, data)
