"""What each robust aggregation withstands: attacks by f of n clients on FedAvg and FedSGM.

    python benchmarks/liars.py [--tiny]

Liars change their updates and, under FedSGM, their constraint values. A cell has f and g at the
end, over all clients' true data; a run counts as broken if its parameters are not finite.
"""

import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.compression.packets import Dense

TINY = "--tiny" in sys.argv
ROUNDS, CLIENTS, LIARS = (4, 10, 2) if TINY else (150, 20, 4)


def colluding(v, first):
    """Return the same random vector for all liars, of a size that is easily overlooked."""
    return v + 1.5 * jax.random.normal(jax.random.fold_in(jax.random.key(7), v.size), v.shape)


# What a liar answers, of its true answer and its first one
LIES = {
    "none": lambda v, first: v,
    "sign flips": lambda v, first: -v,
    "scaled by -20": lambda v, first: -20 * v,
    "its first answer for ever": lambda v, first: first,
    "constant 3": lambda v, first: jnp.full_like(v, 3.0),
    "not finite": lambda v, first: jnp.full_like(v, jnp.nan),
    "collusion": colluding,
}
FLIPPED, SAYS_NO, SAYS_YES = "flipped labels", "g = -5, true updates", "g = +5, true updates"


class Attacked(eqx.Module):
    """The part of an algorithm in which the first clients lie."""

    update: jax.Array = eqx.field(kw_only=True)  # the number of the lie
    value: jax.Array = eqx.field(kw_only=True)  # what is added to g

    def init_client(self, w):
        return jnp.zeros_like(w), jnp.zeros(()), jnp.zeros((), bool)

    def lie(self, client, v, first, known):
        first = jnp.where(known, first, v)
        told = jax.lax.switch(self.update, list(LIES.values()), v, first)
        return jnp.where(client.index < LIARS, told, v), first

    def improve(self, client: Any, kept: Any, *message: Any) -> Any:
        first, told, known = kept
        honest: Any = super()
        v = honest.improve(client, None, *message)[1].dense()
        answer, first = self.lie(client, v, first, known)
        return (first, told, jnp.ones((), bool)), Dense(answer)

    def measure(self, client: Any, kept: Any) -> Any:
        first, told, known = kept
        honest: Any = super()
        g = honest.measure(client, None)[1]
        answer, told = self.lie(client, g, told, known)
        answer += jnp.where(client.index < LIARS, self.value, 0.0)
        return (first, told, known), answer


class FedAvg(Attacked, fs.FedAvg):
    """FedAvg with liars."""


class FedSGM(Attacked, fs.FedSGM):  # pyright: ignore[reportIncompatibleMethodOverride]
    """FedSGM with liars."""


def flipped(problem: fs.Problem) -> fs.Problem:
    """Return the problem in which the liars' labels are the wrong ones.

    A loss log(1 + exp(±w·x)) with the other label is that of -x.
    """
    liars = (np.arange(problem.n) < LIARS).reshape(-1, 1, 1)
    data = {name: np.where(liars, -x, x) for name, x in problem.samples.values.items()}
    return problem.with_clients(data)


RULES: dict[str, Any] = {
    "plain mean": None,
    "Trimmed(0.2)": fs.Trimmed(LIARS / CLIENTS),
    "Median()": fs.Median(),
    "Clipped(1)": fs.Clipped({"improve": 1.0, "measure": 0.5}),
    f"Krum({LIARS}, keep={CLIENTS - 2 * LIARS})": fs.Krum(LIARS, keep=CLIENTS - 2 * LIARS),
}
problem = fs.problems.neyman_pearson(clients=CLIENTS)
wrong = flipped(problem)
placed = problem.on_device()
bound: Any = placed.constraint


@jax.jit
def truth(w):
    """Return f and g over the true data of all clients."""

    def values(samples):
        return placed.value(w, samples), bound.measure(w, samples, 1)

    return jax.tree.map(jnp.mean, jax.vmap(values)(placed.samples))


def cell(algorithm: fs.Algorithm, name: str, rule: Any) -> str:
    """Return f, and g if it counts, at the end of a run."""
    used = wrong if name == FLIPPED else problem
    try:
        run = fs.solve(used, algorithm, ROUNDS, evaluate_every=ROUNDS, aggregation=rule)
    except fs.Diverged:
        return "broken"
    f, g = map(float, truth(jnp.asarray(run.params)))
    if not np.isfinite(f):
        return "broken"
    return f"{f:.3f}" if isinstance(algorithm, fs.FedAvg) else f"{f:.3f} / {g:+.3f}"


for kind in (FedAvg, FedSGM):
    shown = "f" if kind is FedAvg else "f / g"
    print(f"\n{kind.__name__}: {LIARS} of {CLIENTS} clients lie, {ROUNDS} rounds; {shown}\n")
    print("| attack | " + " | ".join(RULES) + " |")
    print("|---" * (len(RULES) + 1) + "|")
    for name in (*LIES, FLIPPED, *([] if kind is FedAvg else [SAYS_NO, SAYS_YES])):
        number = jnp.int32(list(LIES).index(name) if name in LIES else 0)
        value = jnp.asarray({SAYS_NO: -5.0, SAYS_YES: 5.0}.get(name, 0.0))
        given: dict[str, Any] = {"step_size": 0.3, "update": number, "value": value}
        given |= {} if kind is FedAvg else {"tolerance": 0.05}
        algorithm = kind(**given)
        cells = [cell(algorithm, name, rule) for rule in RULES.values()]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
