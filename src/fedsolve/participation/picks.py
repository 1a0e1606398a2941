"""How often each client was selected, counted on the server in every round.

The history has `picks`, the rounds so far in which each client was selected, and `selection_skew`,
which says how far that is from uniform draws. Unlike `cohort`, they also know of the rounds that
were not evaluated.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedsolve.types import Cohort, Flag, Flags, Info, Round

MOST_SHOWN = 10_000  # clients; with more of them the history has the skew only

Picks = Int[Array, " n"]


def no_picks(clients: int) -> Picks:
    """Return the counts before the first round."""
    return jnp.zeros(clients, jnp.int32)


def picked(picks: Picks | None, cohort: Cohort, taking: Flag | Flags) -> Picks | None:
    """Count one more round in which those of the cohort that are flagged took part."""
    if picks is None:
        return None
    flags = jnp.broadcast_to(jnp.asarray(taking), (len(cohort),))
    return picks.at[cohort].add(flags.astype(jnp.int32))


def noted(picks: Picks | None, rounds: Round) -> Info:
    """Return what to record of the counts after some rounds."""
    if picks is None:
        return {}
    info: Info = {"selection_skew": selection_skew(picks, rounds)}
    return {"picks": picks, **info} if len(picks) <= MOST_SHOWN else info


def selection_skew(picks: Picks, rounds: Round) -> Float[Array, ""]:
    """Return the deviation of picks between clients, in units of that of uniform draws.

    After T rounds in which a share s of the clients was selected, uniform draws without replacement
    give picks with the variance T s(1 − s). So the skew is about 1 for them, 0 for turns, and √T if
    the same clients are selected in every round.
    """
    total = jnp.asarray(rounds, jnp.result_type(float))
    counts = jnp.asarray(picks, total.dtype)  # the mean of integers would be rounded to 32 bits
    share = jnp.mean(counts) / total
    usual = total * share * (1 - share)
    return jnp.sqrt(jnp.where(usual > 0, jnp.var(counts) / jnp.where(usual > 0, usual, 1), 0))
