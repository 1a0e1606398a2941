"""Compare MLflow's database with a run's history."""

import sqlite3
from collections import Counter

import numpy as np
import pandas as pd


def metrics(file):
    """All that MLflow's database has, as (run's name, metric, step, value)."""
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=30) as base:
        return base.execute(
            "select name, key, step, value from metrics join runs using (run_uuid)"
        ).fetchall()


def check(file, history):
    """Everything of the folder's table is there, once."""
    found = metrics(file)
    assert max(Counter((name, key, step) for name, key, step, _ in found).values()) == 1
    values = {(name, key, step): value for name, key, step, value in found}
    table = pd.read_csv(history)
    labels = table["seed"].map("seed-{}".format)
    if "variant" in table:
        labels = table["variant"] + "/" + labels
    columns = [name for name in table if name not in ("variant", "seed")]
    assert len(values) == table[columns].count().sum()
    for name in columns:
        expected = [values[(v, name, k)] for v, k in zip(labels, table["round"], strict=True)]
        np.testing.assert_allclose(table[name], expected, rtol=1e-6)
