"""Draws docs/pictures/cartpole-sensitivity.png from docs/results.

python benchmarks/cartpole_pictures.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from PIL import Image

from tiny import tiny

DOCS = Path(__file__).parent.parent / "docs"
OUT = tiny(DOCS / "pictures", Path())


def save(figure, name):
    """In 64 colours, which keeps the file small."""
    figure.savefig(OUT / name, dpi=100)
    with Image.open(OUT / name) as picture:
        small = picture.convert("RGB").quantize(64)
    small.save(OUT / name, optimize=True)
    print(f"Written to {OUT / name}")


def sensitivity():
    table = pd.read_csv(DOCS / "results" / "cartpole-sensitivity.csv")
    own = ["log_std", "trace", "radius", "damping", "value_rate", "discount"]
    grid = table[table[own].isna().all(axis=1) & (table["step_size"] == 1)]
    figure, axes = plt.subplots(1, 4, figsize=(10, 2.9), sharey=True)
    for column, scaling in enumerate(("common", "separate")):
        for offset, name, bounds in ((0, "reward", (0, 200)), (1, "cost", (10, 50))):
            means = grid[grid["scaling"] == scaling].pivot_table(
                index="tolerance", columns="beta", values=name
            )
            axis = axes[2 * column + offset]
            colours = "viridis" if name == "reward" else "RdYlGn_r"
            axis.imshow(means, cmap=colours, vmin=bounds[0], vmax=bounds[1], aspect="auto")
            for y, row in enumerate(means.to_numpy()):
                for x, value in enumerate(row):
                    axis.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=7)
            labels = [f"{beta:g}" if beta < 1e5 else "hard" for beta in means.columns]
            axis.set_xticks(range(len(labels)), labels, fontsize=7)
            axis.set_yticks(range(len(means)), [f"{t:g}" for t in means.index], fontsize=7)
            axis.set_title(f"{name}, {scaling} scaling", fontsize=9)
            axis.set_xlabel("β", fontsize=8)
    axes[0].set_ylabel("tolerance ε", fontsize=8)
    figure.tight_layout()
    save(figure, "cartpole-sensitivity.png")


if __name__ == "__main__":
    sensitivity()
