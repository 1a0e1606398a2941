"""What an owner lets a server ask."""

import json
import resource
import urllib.request
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedsolve as fs
from fedsolve.flare import jobs
from fedsolve.flare.limits import EXACT, Guard, Limits, fewest_samples, significant
from fedsolve.flare.processes import HOME, OWNER
from fedsolve.flare.site import SiteClients
from fedsolve.problem.samples import Samples
from fedsolve.storage.arrays import decode, encode
from tests.support import examples
from tests.support.conformance import ALGORITHMS
from tests.support.deployment import experiment
from tests.support.in_process import SITES, Wires, deploy, part

pytestmark = pytest.mark.filterwarnings("ignore")  # FLARE's own

ROUNDS = 6
ALGORITHM = ALGORITHMS["FedSGM hard"]


def guarded(home, limits, every=1, first=0, count=6):
    """A site whose owner has limits."""
    home.mkdir(parents=True, exist_ok=True)
    guard = Guard(limits, home, ROUNDS, every)
    own = part(examples.least_squares(), first, count)
    share = SiteClients(home, own, ALGORITHM, 0, "float64", guard=guard)
    share.answer(encode({"kind": "hello", "total": 6}, {}))
    return share


def told(share, round, w, name="x"):
    """The answer to an evaluation at a w of the server's choice: values, or why not."""
    news = {"want": name, "whole": True, "from": [], "packets": []}
    head = {"kind": "evaluate", "round": round, "first": 0, "w": news}
    head, arrays = decode(share.answer(encode(head, {"w": np.asarray(w)})), 10_000)
    return arrays or head.get("reason", "")


def test_a_curious_server_gets_one_evaluation_for_each_round(tmp_path):
    """62 evaluations at a w of the server's choice gave the ages of 20 patients."""
    share = guarded(tmp_path, Limits())
    size = examples.least_squares().size
    found = [told(share, 3, row, str(k)) for k, row in enumerate(np.eye(size))]
    assert "values.0" in found[0]
    assert set(found[1:]) == {"it told f and g after round 3, and does not at other parameters"}
    again = told(share, 3, np.eye(size)[0], "again")
    np.testing.assert_array_equal(again["values.0"], found[0]["values.0"])
    assert "it told f and g after round 3" in told(share, 2, np.ones(size))
    assert "values.0" in told(share, 4, np.ones(size))
    for round in (0, ROUNDS + 1, 10**6):
        assert told(share, round, np.ones(size)) == f"the run has no evaluation after round {round}"
    # A new process of the site, as after a new job, knows what was told.
    share = guarded(tmp_path, Limits())
    assert "it told f and g after round 4" in told(share, 4, np.zeros(size))
    assert "values.0" in told(share, 5, np.ones(size))
    log = (tmp_path / "questions.log").read_text().splitlines()
    assert len(log) == 1 + size + 6 + 1 + 2
    assert sum("evaluate round 3: refused: it told f and g" in line for line in log) == size - 1
    assert not any("\x1b" in line for line in log)


def test_only_rounds_with_an_evaluation_are_told(tmp_path):
    share = guarded(tmp_path, Limits(), every=4)
    w = np.ones(examples.least_squares().size)
    for round in range(1, ROUNDS + 1):
        answer = told(share, round, w * round)
        if round in (4, ROUNDS):
            assert "values.0" in answer
        else:
            assert answer == f"the run has no evaluation after round {round}"


def test_an_owner_limits_evaluations(tmp_path):
    """A run with more of them does not begin."""
    sentence = "The run has 3 evaluations, and this site's owner allows 2; evaluate less often"
    with pytest.raises(fs.InvalidInput, match=sentence):
        guarded(tmp_path, Limits(evaluations=2), every=2)
    share = guarded(tmp_path, Limits(evaluations=2), every=3)
    w = np.ones(examples.least_squares().size)
    found = [told(share, round, w * round) for round in range(ROUNDS + 2)]
    assert [round for round, answer in enumerate(found) if "values.0" in answer] == [3, 6]


def test_reported_values_are_rounded_and_replies_are_not(tmp_path):
    """Rounding changes what is reported by the last digits only, and nothing that is computed."""
    problem = examples.least_squares()

    def run(name, limits):
        wires = Wires(problem, ALGORITHM, tmp_path / name)
        for site, (first, count) in SITES.items():
            home = tmp_path / name / "guarded" / site
            wires.shares[site] = guarded(home, limits, 1, first, count)
        return deploy(problem, ALGORITHM, wires, tmp_path / name / "server", ROUNDS)[0]

    exact, rounded = run("exact", Limits(digits=EXACT)), run("rounded", Limits(digits=3))
    np.testing.assert_array_equal(exact.params, rounded.params)
    for name in ("objective", "constraint"):
        a, b = exact.history[name], rounded.history[name]
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)
        assert (a != b).any()
    np.testing.assert_array_equal(rounded.history["clients_evaluated"], 6)


@given(st.floats(width=64), st.integers(1, 16))
def test_significant_digits(value, digits):
    (found,) = significant(np.asarray([value]), digits).tolist()
    if not np.isfinite(value) or value == 0:
        np.testing.assert_array_equal(found, value)
        return
    if 1e-290 < abs(value) < 1e290:
        unit = 10.0 ** (np.floor(np.log10(abs(value))) - digits + 1)
        assert abs(found - value) <= 0.51 * unit + np.spacing(abs(value))
    assert len(Decimal(repr(found)).normalize().as_tuple().digits) <= digits


def test_every_set_of_samples_counts():
    one = {"x": np.ones((3, 7, 2))}
    assert fewest_samples(Samples(one)) == 7
    assert fewest_samples(Samples(one | {"y": np.ones((3, 4, 2)), "z": np.ones(3)})) == 4
    assert fewest_samples(Samples(one | {"constant": np.ones((3, 2))})) == 7
    assert fewest_samples(Samples({"x": np.ones((3, 6)), "z": np.ones(3)})) == 6
    sizes = np.asarray([5, 3, 7])
    masked = Samples(one, np.arange(7) < sizes[:, None])
    assert fewest_samples(masked) == 3
    two = Samples(one, {"x": masked.mask, "y": np.arange(4) < np.asarray([4, 2, 4])[:, None]})
    assert fewest_samples(two) == 2
    problem = examples.least_squares()
    fewest = fewest_samples(problem.samples)
    Limits(samples=fewest).check_samples(problem)
    with pytest.raises(fs.InvalidInput, match="fewer samples than this site's owner wants"):
        Limits(samples=fewest + 1).check_samples(problem)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"sample": 3}, "takes samples, evaluations, digits, memory, seconds, problems"),
        ({"memory": "much"}, "limits.memory must be a number"),
        ({"memory": 0.0}, "limits.memory must be positive"),
        ({"seconds": -1.0}, "limits.seconds must be positive"),
        ({"samples": 0}, "limits.samples must be a whole number"),
        ({"digits": "all"}, "limits.digits must be a whole number"),
        ({"problems": "adult"}, "limits.problems takes a list"),
        ({"secure": "yes"}, "limits.secure takes true or false"),
        ({"held_out": 1}, "limits.held_out takes true or false"),
        ({"epsilon": 0.0}, "limits.epsilon must be positive"),
        ([], "takes samples"),
    ],
)
def test_wrong_limits_are_refused(table, sentence):
    with pytest.raises(fs.InvalidInput, match=sentence):
        Limits.of({"limits": table})


def test_a_problem_may_not_take_more_memory_than_allowed():
    """One of 56 GiB was built, or ended the process."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limits = Limits(memory=0.5)
    refused = pytest.raises(fs.InvalidInput, match=r"needs more memory than .* allows: 0.5 GiB")
    with refused, limits.memory_limited():
        fs.problems.linear_regression(clients=1000, size=100_000)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with limits.memory_limited():
        assert fs.problems.linear_regression(clients=4, size=3).n == 4
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_job_downloads_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSOLVE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    monkeypatch.setenv(OWNER, str(tmp_path / "site.toml"))
    monkeypatch.setenv("FEDSOLVE_OFFLINE", "1")  # as every server and site is started
    asked = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: asked.append(1) or 1 / 0)
    (tmp_path / "site.toml").write_text("[data]\nshare = [0, 2]\n")
    table = experiment(4).resolved | {"problem": {"kind": "adult"}}
    site = jobs.SiteJob(json.dumps(table), "x")
    site.start()
    head, _ = decode(site.answer(0, encode({"kind": "hello", "total": 0}, {})), 0)
    assert head["reason"].endswith("is not on this machine, and jobs download nothing.")
    assert asked == []


def test_a_job_keeps_to_the_owners_limits(tmp_path, monkeypatch):
    """The limits of a site's file hold for its jobs; the defaults, too."""
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    monkeypatch.setenv(OWNER, str(tmp_path / "site.toml"))
    hello = encode({"kind": "hello", "total": 0}, {})

    def said(limits, name, **changes):
        (tmp_path / "site.toml").write_text(f"[data]\nshare = [0, 2]\n{limits}")
        site = jobs.SiteJob(json.dumps(experiment(4).resolved | changes), name)
        site.start()
        head, _ = decode(site.answer(0, hello), 0)
        if site._alone is not None:
            site._alone.close()
        return head.get("reason", head["status"])

    assert said("", "a") == "ok"
    log = tmp_path / "home/runs/a/0/questions.log"
    assert "hello: " in log.read_text()
    assert "fewer samples" in said("[limits]\nsamples = 1000\n", "b")
    only = "[limits]\nproblems = ['adult', 'neyman-pearson']\n"
    assert said(only, "c") == "ok"
    assert said("[limits]\nproblems = []\n", "d") == (
        "'neyman_pearson' is not among the built-in problems allowed here."
    )
    run = experiment(4).resolved["run"]
    secure, want = {"aggregation": "SecureSum"}, "This site's owner wants run."
    private = secure | {"privacy": {"epsilon": 4.0, "delta": 1e-3}}
    assert said("[limits]\nsecure = true\n", "f") == f"{want}aggregation=SecureSum."
    least = "[limits]\nepsilon = 3.0\n"
    for name, more in (("g", {}), ("h", secure), ("i", private)):
        assert said(least, name, run=run | more) == f"{want}privacy.epsilon of at most 3."
    assert said("[limits]\nsampels = 3\n", "e") == (
        "Its data or its owner's file is not valid; see its log."
    )
