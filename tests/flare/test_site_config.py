"""A site's own data."""

from pathlib import Path

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.cli import deploy as commands
from fedsolve.flare.site_config import site_problem

pytestmark = pytest.mark.filterwarnings("ignore")  # FLARE's own


def by_rows(path):
    """An owner's own loader: one client for each line of a file."""
    rows = np.loadtxt(path, delimiter=",")
    return {"minority": rows[:, None, :30], "majority": rows[:, None, 30:]}


def test_a_sites_own_data(tmp_path):
    problem = fs.problems.neyman_pearson(clients=4)
    rows = {k: v[1:3] for k, v in problem.samples.values.items()}
    np.savez(tmp_path / "own.npz", **rows)
    (tmp_path / "a.toml").write_text('[data]\nloader = "npz"\npath = "own.npz"\n')
    (tmp_path / "b.toml").write_text("[data]\nshare = [1, 2]\n")
    for name in "ab":
        own = site_problem(problem, Path(tmp_path / f"{name}.toml"))
        assert own.n == 2
        np.testing.assert_array_equal(own.samples.values["minority"], rows["minority"])
    whole = np.random.default_rng(0).standard_normal((3, 60))
    np.savetxt(tmp_path / "rows.csv", whole, delimiter=",")
    loader = f'loader = "{__name__}:by_rows"'
    (tmp_path / "c.toml").write_text(f'[data]\n{loader}\npath = "rows.csv"\n')
    own = site_problem(problem, tmp_path / "c.toml")
    np.testing.assert_allclose(own.samples.values["minority"][:, 0], whole[:, :30], rtol=1e-6)
    np.savez(tmp_path / "uneven.npz", a=np.ones((2, 3)), b=np.ones((3, 3)))
    (tmp_path / "text.npz").write_text("no arrays")
    npz = "[data]\nloader = 'npz'\npath = '{}'\n".format
    for text, sentence in [
        ("[data]\nshare = [3, 2]\n", "the problem has 4 clients, not 5"),
        ("[data]\nshare = [0, 0]\n", "share takes a first client from 0 on"),
        (npz("none.npz"), "Cannot load"),
        (npz("text.npz"), "Cannot load"),
        (npz("uneven.npz"), "need their clients on a leading axis, got a"),
        ("[data]\nloader = 'pickle'\n", "needs `share`"),
        (
            "[data]\nloader = 'pickle'\npath = 'x'\n",
            'loader takes "csv", "parquet", "ar',
        ),
        ("[data]\nloader = 'none:no'\npath = 'x'\n", "No module named 'none'"),
        ("[data]\nshare = 3\n", "share takes"),
        ("nothing", "Cannot read"),
    ]:
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(fs.InvalidInput, match=sentence):
            site_problem(problem, tmp_path / "bad.toml")
    # An owner's mistake is told before anything is started.
    (tmp_path / "bad.toml").write_text(npz("none.npz"))
    with pytest.raises(fs.InvalidInput, match="Cannot load"):
        commands.site(str(tmp_path / "no kit"), str(tmp_path / "bad.toml"))
