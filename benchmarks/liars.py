"""What each robust aggregation withstands: attacks by f of n clients on FedSGM.

    python benchmarks/liars.py [--tiny]

Liars change their updates and their constraint values. A cell has f and g at the end, over the
honest clients' problem; a run counts as broken if its parameters are not finite.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import fedsolve as fs
from fedsolve.compression.packets import Dense

TINY = "--tiny" in sys.argv
ROUNDS, CLIENTS, LIARS = (4, 10, 2) if TINY else (150, 20, 4)


def attacked(attack) -> type[fs.FedSGM]:
    """Return FedSGM in which the first clients answer `attack(answer, client)`."""

    class Attacked(fs.FedSGM):
        def measure(self, client, residual):
            residual, value = super().measure(client, residual)
            return residual, jnp.where(client.index < LIARS, attack(value, client), value)

        def improve(self, client, residual, message):
            residual, packet = super().improve(client, residual, message)
            v = packet.dense()
            return residual, Dense(jnp.where(client.index < LIARS, attack(v, client), v))

    return Attacked


def colluding(v, client):
    """Return the same random vector for all liars, of a size that is easily overlooked."""
    key = jax.random.fold_in(jax.random.key(7), v.size)
    return v + 1.5 * jax.random.normal(key, v.shape)


ATTACKS = {
    "none": lambda v, client: v,
    "sign flips": lambda v, client: -v,
    "scaled by -20": lambda v, client: -20 * v,
    "constant": lambda v, client: jnp.full_like(v, 3.0),
    "not finite": lambda v, client: jnp.full_like(v, jnp.nan),
    "collusion": colluding,
}
RULES = {
    "plain mean": None,
    "Trimmed(0.2)": fs.Trimmed(LIARS / CLIENTS),
    "Median()": fs.Median(),
    "Clipped(1)": fs.Clipped({"improve": 1.0, "measure": 0.5}),
    f"Krum({LIARS}, keep={CLIENTS - 2 * LIARS})": fs.Krum(LIARS, keep=CLIENTS - 2 * LIARS),
}

problem = fs.problems.neyman_pearson(clients=CLIENTS)
print(f"Neyman-Pearson, {LIARS} of {CLIENTS} clients lie, {ROUNDS} rounds: f / g at the end")
print("| attack | " + " | ".join(RULES) + " |")
print("|---" * (len(RULES) + 1) + "|")
for name, attack in ATTACKS.items():
    cells = []
    for rule in RULES.values():
        algorithm = attacked(attack)(0.3, 0.05)
        try:
            run = fs.solve(problem, algorithm, ROUNDS, evaluate_every=ROUNDS, aggregation=rule)
            f, g = run.history["objective"][-1], run.history["constraint"][-1]
            cells.append(f"{f:.3f} / {g:+.3f}" if np.isfinite(f) else "broken")
        except fs.Diverged:
            cells.append("broken")
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
