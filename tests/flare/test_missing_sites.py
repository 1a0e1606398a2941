"""Real federations of four hospitals in which one does not take part: nobody is lost in silence."""

import re
import time

import numpy as np
import pytest

from fedsolve.flare import processes
from tests.support.deployment import wait_until
from tests.support.hospital_federation import ALLOW, HOSPITALS, Hospitals

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("flare"),
    pytest.mark.filterwarnings("ignore"),  # FLARE's own
]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory):
    found = Hospitals(tmp_path_factory.mktemp("hospitals"))
    try:
        yield found
    finally:
        processes.stop(list(found.started.values()))


def nan(arrays):
    arrays["minority"][1, 0, 0] = np.nan
    return arrays


def a_column_fewer(arrays):
    return {name: values[..., :-1] for name, values in arrays.items()}


def without_south(results, why, rounds=6):
    """Every place in which the missing hospital must be named."""
    status, told, facts, history = results
    assert status == 3, told
    assert "Finished without south." in told
    assert re.search(rf"Without south: it missed rounds 1 to {rounds}, since 20.*{why}", told), told
    assert re.search(r"6 of (more|8)", told), told  # the closing table
    assert "unknown" in told  # whether it is feasible
    assert re.search(rf"Warning: south: .*{why}", told), told  # while it went on
    assert facts["status"] == "incomplete"
    assert "Without south" in facts["message"]
    record = facts["participation"]["seed-0"]
    assert record["missing"].keys() == {"south"}
    assert re.search(why, record["missing"]["south"])
    for name in HOSPITALS:
        site = record["sites"][name]
        assert site["answered"] == (0 if name == "south" else rounds)
        assert site["clients"] == (2 if name != "south" else site["clients"])
    (gap,) = record["sites"]["south"]["missed"]
    assert (gap["from"], gap["to"]) == (1, rounds)
    np.testing.assert_array_equal(history["clients_evaluated"], 6)


@pytest.mark.parametrize(
    ("change", "allow", "why", "console"),
    [
        (lambda arrays: arrays, "", "allow-list", "allow-list"),
        (nan, ALLOW, "not valid", "of client 1 has a NaN"),
        (a_column_fewer, ALLOW, "not valid", "this site does not take part"),
    ],
    ids=["refused by the owner", "a NaN in the data", "a column fewer"],
)
def test_a_site_that_cannot_take_part(hospitals, change, allow, why, console):
    hospitals.start_site("south", change, allow)
    before = len(hospitals.console("south"))
    without_south(hospitals.submit(), why)
    assert console in hospitals.console("south")[before:]
    status, told = hospitals.command("status", "--kit", hospitals.admin)
    assert status == 0
    assert re.search(rf"run-{hospitals.runs}: .*finished without south", told), told
    # With a quorum, or a number of sites, the run does not begin.
    for setting in ("deploy.quorum=1.0", "deploy.sites=4"):
        status, told, facts, history = hospitals.submit(setting)
        assert status == 3, told
        assert re.search(rf"3 sites are ready of 4, and 4 must be \(south: .*{why}", told), told
        assert (facts["status"], history) == ("incomplete", None)
        assert "3 sites are ready of 4" in facts["message"]


def test_a_site_killed_a_second_before_the_run(hospitals):
    hospitals.start_site("south")
    hospitals.stop("south")
    time.sleep(1)
    without_south(hospitals.submit(), "no answer")


def test_a_site_that_comes_back_within_the_patience(hospitals):
    """It misses the rounds, and the last evaluation is over everyone."""
    hospitals.start_site("south")
    hospitals.stop("south")
    time.sleep(1)
    hospitals.runs += 1
    out, run = f"out-{hospitals.runs}", f"run-{hospitals.runs}"
    words = hospitals.words(out, run, 6, "deploy.patience=200")
    (hospitals.place / "follower.log").unlink(missing_ok=True)
    follower = hospitals.start("follower", *words)
    wait_until(lambda: "waiting up to 200 s for south" in hospitals.console("follower"))
    hospitals.start_site("south")
    status, told = follower.wait(240), hospitals.console("follower")
    facts, history = hospitals.results(out)
    assert history["clients_evaluated"].tolist() == [6] * 5 + [8], told
    assert (status, facts["status"]) == (3, "incomplete")  # it took no part in any round
    assert "Without south: it missed rounds 1 to 6" in told


def test_a_site_that_is_not_back_after_a_restart_of_the_server(hospitals):
    hospitals.start_site("south")
    hospitals.runs += 1
    out, run = f"out-{hospitals.runs}", f"run-{hospitals.runs}"
    words = hospitals.words(out, run, 200)
    follower = hospitals.start("follower", *words)
    progress = hospitals.kits / f"localhost/fedsolve/runs/{run}/0/progress.jsonl"
    wait_until(lambda: progress.exists() and progress.read_text().count('"round"') > 5)
    processes.stop([follower, hospitals.started["server"], hospitals.started["south"]])
    words[words.index("200")] = "200"
    hospitals.start_server()
    for name in HOSPITALS:
        if name != "south":
            wait_until(
                lambda name=name: (
                    f"site {name}" in hospitals.command("status", "--kit", hospitals.admin)[1]
                )
            )
    words[words.index(out)] = out = f"{out}-again"
    status, told = hospitals.command(*words)
    assert status == 3, told
    facts, history = hospitals.results(out)
    record = facts["participation"]["seed-0"]
    assert record["missing"].keys() == {"south"}
    (gap,) = record["sites"]["south"]["missed"]
    assert gap["from"] > 1
    assert gap["to"] == 200
    assert record["clients"] == 8
    assert "6 of 8" in told
    assert "unknown" in told
    counts = history["clients_evaluated"]
    assert (counts[0], counts[-1]) == (8, 6)
