"""Payment rules under one budget: samples, accuracy, who stays. The numbers of docs/payments.md.

    python benchmarks/payments.py                # MNIST below FEDSOLVE_DATA
    python benchmarks/payments.py --generated    # generated data

A linear classifier is trained on subsets of the data, several times for each size; a learning curve
is fitted to its test accuracy. Then twenty players with costs of their own, c_i = b_i N_i + a_i
N_i²/2, play the game in which each gains from the accuracy of the common model, and a rule pays
them. A rule that has a size (a price, a reward) has the greatest size that the budget allows. At
the end a model is trained on the samples that are contributed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from sklearn.linear_model import LogisticRegression

import fedsolve as fs
from tiny import tiny

PLAYERS, BUDGET, OUTSIDE, REWARD = tiny((20, 40.0, 1.0, 1.0), (4, 40.0, 1.0, 1.0))
SIZES = tiny((20, 40, 80, 160, 320, 640, 1280, 2560), (10, 20, 40, 80))
REPEATS, TESTED, MOST = tiny((5, 5000, 200), (2, 200, 40))
HALVINGS = tiny(30, 6)
Rule = Callable[[float], fs.games.Part]  # size -> payment


def data(generated: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training and test samples."""
    rng = np.random.default_rng(0)
    if not generated:
        found = fs.datasets.load("mnist")
        train, test = found.train, found.test
        x, y = (np.asarray(train[k]) for k in ("x", "y"))
        tx, ty = (np.asarray(test[k])[:TESTED] for k in ("x", "y"))
        scale = 255.0 if x.dtype == np.uint8 else 1.0
        return x.reshape(len(x), -1) / scale, y, tx.reshape(len(tx), -1) / scale, ty
    centers = rng.standard_normal((5, 30))
    y = rng.integers(0, 5, 8000)
    x = centers[y] + 2.5 * rng.standard_normal((8000, 30))
    return x[:-TESTED], y[:-TESTED], x[-TESTED:], y[-TESTED:]


class Trainer:
    """The test accuracy of a classifier that is trained on n samples."""

    def __init__(self, generated: bool):
        self.x, self.y, self.tx, self.ty = data(generated)

    def accuracy(self, n: int, seed: int) -> float:
        rng = np.random.default_rng(seed)
        rows = rng.choice(len(self.y), n, replace=False)
        if len(np.unique(self.y[rows])) < 2:
            return float(np.mean(self.ty == self.y[rows[0]]))
        model = LogisticRegression(C=1.0, max_iter=60, tol=1e-3)
        with np.errstate(all="ignore"):
            model.fit(self.x[rows], self.y[rows])
        return float(model.score(self.tx, self.ty))


def measured(trainer: Trainer) -> fs.games.FittedCurve:
    """The learning curve of the classifier."""
    accuracy = [[trainer.accuracy(n, 100 * n + r) for r in range(REPEATS)] for n in SIZES]
    found = fs.games.fit_learning_curve(SIZES, accuracy)
    print("| samples | accuracy | its spread | curve | its error |\n|---|---|---|---|---|")
    for n, row, error in zip(SIZES, accuracy, found.error, strict=True):
        told = f"{np.mean(row):.4f} | {np.std(row, ddof=1):.4f} | {float(found.curve(n)):.4f}"
        print(f"| {n} | {told} | {error:.4f} |")
    print(f"\nmisfit {found.misfit:.2f}\n")
    return found


def largest(game: fs.Game, rule: Rule) -> fs.games.Part:
    """The payment of a rule with the greatest size for which the budget is enough."""

    def spent(size: float) -> float:
        found = fs.games.who_stays(game, rule(size), outside=OUTSIDE, tolerance=1e-7)
        return found.spent

    low, high = 0.0, 1e-3
    while spent(high) <= BUDGET and high < 1e6:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if spent(middle) <= BUDGET else (low, middle)
    return rule(low)


def main(generated: bool) -> None:
    trainer = Trainer(generated)
    curve = measured(trainer).curve
    rng = np.random.default_rng(1)
    rate, bend = rng.uniform(0.005, 0.03, PLAYERS), rng.uniform(1e-5, 2e-4, PLAYERS)
    game = fs.Game(
        fs.games.AccuracyPayoff(curve, REWARD),
        fs.games.QuadraticCost(np.diag(bend), rate),
        1,
        np.full(PLAYERS, float(MOST)),
    )
    best = fs.games.best_prices(game, BUDGET)
    rules: dict[str, fs.games.Part | None] = {
        "nothing": None,
        "one price": largest(game, lambda size: fs.games.PricePerSample(size)),
        "best prices": best.payment,
        "shared budget": fs.games.SharedBudget(BUDGET),
        "leave-one-out": largest(game, lambda size: fs.games.LeaveOneOutPayoff(curve, size)),
        "Shapley": largest(game, lambda size: fs.games.ShapleyPayoff(curve, size, orders=64)),
    }
    print("| rule | stay | free riders | samples | paid | accuracy, curve | trained |")
    print("|---|---|---|---|---|---|---|")
    for name, payment in rules.items():
        found = fs.games.who_stays(game, payment, outside=OUTSIDE, tolerance=1e-7)
        tell(name, trainer, curve, found.stays.sum(), found.free_riders.sum(), found)
    # bids: everyone offers its most, at its mean cost of a sample
    bids = rate + 0.5 * bend * MOST
    sold = fs.games.auction(bids, np.full(PLAYERS, float(MOST)), BUDGET)
    tell("auction", trainer, curve, sold.wins.sum(), 0, sold)


def tell(name, trainer, curve, stay, riders, found) -> None:
    n = int(found.contributions.sum())
    trained = np.mean([trainer.accuracy(n, r) for r in range(REPEATS)]) if n else np.nan
    told = f"{n} | {found.spent:.1f} | {float(curve(n)):.3f} | {trained:.3f}"
    print(f"| {name} | {stay} | {riders} | {told} |", flush=True)


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("--generated", action="store_true")
    main(words.parse_args().generated)
