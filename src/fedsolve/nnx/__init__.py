"""Flax NNX modules as problems; needs Flax, `pip install flax`."""

from fedsolve.nnx.problem import load, problem

__all__ = ["load", "problem"]
