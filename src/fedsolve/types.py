"""Types that many modules share.

Shapes are written as in jaxtyping: `d` parameters, `n` clients, `m` clients of a cohort.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

if TYPE_CHECKING:
    PyTree = Any  # jaxtyping's own is unknown to a static type checker
else:
    from jaxtyping import PyTree

Vector = Float[Array, " d"]  # parameters w, or a direction
Personal = Float[Array, " p"]  # parameters that a client keeps to itself
Cohort = Int[Array, " m"] | Int[np.ndarray, " m"]  # the indices of some clients
Flag = Bool[Array, ""] | Bool[np.ndarray, ""] | np.bool_ | bool
Flags = Bool[Array, " m"] | Bool[np.ndarray, " m"]  # one for each client of a cohort
Number = float | Float[Array, ""] | Int[Array, ""] | np.number  # plain or traced
ArrayLike = jax.typing.ArrayLike | Sequence  # what NumPy turns into an array of numbers
Round = Int[Array, ""] | Int[np.ndarray, ""] | np.integer | int  # counted from 0
PRNGKey = Key[Array, ""]
ClientState = PyTree  # what an algorithm keeps for one client
ServerState = PyTree  # and on the server
Message = PyTree  # what the server sends with a question
Reply = PyTree  # what a client answers
Info = dict[str, PyTree]  # what a round writes in the history, by column
Function = Callable[..., Any]  # of a user, whose arguments follow from its role
Table = dict[str, Any]  # a TOML table or a JSON object: values may be of any type
