"""Tables of hospitals: a schema, and files that fit it."""

import numpy as np

import fedsolve as fs

FEATURES = {
    "age": {"kind": "numeric", "units": "years", "least": 0, "most": 130, "missing": "mean"},
    "pressure": {"kind": "numeric", "missing": 120},
    "stage": {"kind": "categorical", "categories": ["I", "II", "III"], "missing": "category"},
    "smoker": {"kind": "binary", "values": ["no", "yes"]},
}
LABEL = {"column": "died", "positive": "yes", "negative": "no"}
GROUP = {"column": "sex", "protected": "F", "unprotected": "M"}


def write(folder, sizes, seed=0):
    """Write one file for each size; some ages, pressures and stages are missing."""
    rng = np.random.default_rng(seed)
    for number, size in enumerate(sizes):
        rows = ["sex,age,died,stage,pressure,smoker"]
        for _ in range(size):
            sex, age = rng.choice(["F", "M"]), rng.normal(60 + number, 10)
            stage, smoker = rng.choice(["I", "II", "III", "NA"]), rng.choice(["yes", "no"])
            pressure = rng.normal(125, 12)
            risk = 0.1 * (age - 60) + 0.5 * (smoker == "yes") + 0.8 * (sex == "M") - 0.4
            died = "yes" if rng.random() < 1 / (1 + np.exp(-risk)) else "no"
            shown = [f"{v:.1f}" if rng.random() > 0.1 else "" for v in (age, pressure)]
            rows.append(f"{sex},{shown[0]},{died},{stage},{shown[1]},{smoker}")
        (folder / f"hospital-{number}.csv").write_text("\n".join(rows) + "\n")


def problem(folder, features=FEATURES, label=LABEL, group=GROUP, **options):
    """The problem over a folder's files."""
    return fs.problems.tabular(features, label, group, folder, **options)
