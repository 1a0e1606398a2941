"""An experiment file imports nothing that its user has not allowed."""

import json
import sys
import textwrap

import pytest

import fedsolve as fs
from fedsolve.experiments import config
from tests.support.commands import fedsolve  # noqa: F401  (a fixture)

FILE = """
[problem]
kind = "PLACE"
clients = 4
[algorithm]
kind = "FedAvg"
step_size = 0.1
[run]
rounds = 2
"""
NAMES = {  # where a configuration may name a module
    "problem": ("problem.kind", "hostile:problem"),
    "algorithm": ("algorithm", "{ kind = 'hostile:algorithm' }"),
    "part": ("algorithm.uplink", "{ kind = 'hostile:part' }"),
    "part by its name": ("algorithm.uplink", "'hostile:part'"),
    "nested part": ("algorithm.local_optimizer", "{ kind = 'Adam', step_size = 'hostile:part' }"),
    "clock": ("clock", "{ up = { kind = 'hostile:part' } }"),
    "rule": ("run.stop", "{ kind = 'hostile:rule' }"),
    "variant": ("variants.one", "{ 'problem.kind' = 'hostile:problem' }"),
    "a command": ("problem", "{ kind = 'os:system', command = 'touch ran' }"),
}


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A module that leaves a mark when it is imported."""
    mark = tmp_path / "ran"
    (tmp_path / "hostile.py").write_text(
        textwrap.dedent(f"""
        import fedsolve as fs
        open({str(mark)!r}, "w").close()
        algorithm = part = rule = fs.FedAvg

        def problem(clients: int = 4) -> fs.Problem:
            return fs.problems.neyman_pearson(clients=clients)

        class Spy(fs.Tracker):
            pass
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    return mark


@pytest.mark.parametrize(("key", "value"), NAMES.values(), ids=NAMES.keys())
def test_nothing_is_imported_that_is_not_allowed(fedsolve, hostile, tmp_path, key, value):  # noqa: F811
    (tmp_path / "x.toml").write_text(FILE.replace("PLACE", "neyman_pearson"))
    change = ("--set", f"{key}={value}")
    status, _, told = fedsolve("run", "x.toml", *change)
    assert status == 2
    assert "is not on this machine's allow-list; if you trust its code, allow it: --allow" in told
    status, out, told = fedsolve("show", "x.toml", *change)
    assert (status, told) == (0, "")
    assert '"hostile:' in out or '"os:system"' in out
    with pytest.raises(fs.InvalidInput, match="allow-list"):
        config.load("neyman-pearson", [f"{key}={value}"])
    assert not hostile.exists()
    assert "hostile" not in sys.modules


def test_resumed_folders_and_reports_import_nothing(fedsolve, hostile, tmp_path):  # noqa: F811
    """A folder from elsewhere: its configuration and its trackers are not trusted."""
    (tmp_path / "x.toml").write_text(FILE.replace("PLACE", "neyman_pearson"))
    assert fedsolve("run", "x.toml", "--out", "sent")[0] == 0
    good = (tmp_path / "sent/config.toml").read_text()
    (tmp_path / "sent/config.toml").write_text(good.replace("neyman_pearson", "hostile:problem"))
    status, _, told = fedsolve("run", "--resume", "sent", "--rounds", 3)
    assert (status, "'hostile:problem' is not on this" in told) == (2, True)
    assert fedsolve("report", "sent")[0] == 0
    (tmp_path / "sent/config.toml").write_text(good)
    kept = {"key": "1", "experiment": "x", "trackers": ["hostile:Spy"]}
    (tmp_path / "sent/tracking.json").write_text(json.dumps(kept))
    status, _, told = fedsolve("run", "--resume", "sent", "--rounds", 3)
    assert (status, "tracking.json: 'hostile:Spy' is not on this" in told) == (2, True)
    assert not hostile.exists()
    words = ("run", "--resume", "sent", "--rounds", 3, "--allow", "hostile:Spy")
    assert fedsolve(*words)[0] == 0
    assert hostile.exists()


def test_a_user_allows_names(fedsolve, hostile, tmp_path):  # noqa: F811
    (tmp_path / "x.toml").write_text(FILE.replace("PLACE", "hostile:problem"))
    assert fedsolve("run", "x.toml", "--out", "a", "--allow", "hostile:Spy")[0] == 2
    assert not hostile.exists()
    assert fedsolve("run", "x.toml", "--out", "b", "--allow", "hostile:problem")[0] == 0
    settings = tmp_path / "settings/fedsolve/config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text('allow = ["hostile:problem"]\n')
    assert fedsolve("run", "x.toml", "--out", "c")[0] == 0
    assert fedsolve("run", "--resume", "c", "--rounds", 3)[0] == 0
    plain = FILE.replace("PLACE", "neyman_pearson")
    (tmp_path / "y.toml").write_text(plain)
    assert fedsolve("run", "y.toml", "--out", "d")[0] == 0
    assert (tmp_path / "b/history.csv").read_text() == (tmp_path / "d/history.csv").read_text()
    for text, sentence in [
        ("allow = 'hostile:problem x'", 'takes names such as "module:name"'),
        ("allow = [3]", 'takes names such as "module:name", got 3'),
        ("alow = []", "there is no key 'alow'; known: allow"),
        ("= 3", "Cannot read"),
    ]:
        settings.write_text(text)
        status, _, told = fedsolve("run", "x.toml")
        assert (status, sentence in " ".join(told.split())) == (2, True), told
