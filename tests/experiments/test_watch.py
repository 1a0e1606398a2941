"""The live page: what its server answers, and the page in a real browser."""

import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest

import fedsolve as fs
from fedsolve.experiments.watch import MOST_POINTS, NEWS, runs_in, watch
from fedsolve.solving.judgement import judgement

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run, and one that a deployment is writing."""
    place = tmp_path_factory.mktemp("runs")
    fs.experiments.run("neyman-pearson", rounds=12, out=place / "first")
    going = place / "second"
    going.mkdir()
    (going / "run.json").write_text('{"status": "running"}')
    (going / "config.toml").write_text("[run]\nrounds = 900\n[algorithm]\ntolerance = 0.05\n")
    rows = [f"0,{k},{1 / k},{0.2 - k / 5000},{k * 100},{k * 200}" for k in range(1, 801)]
    head = "seed,round,objective,constraint,bytes_up_total,bytes_down_total"
    (going / "history.csv").write_text("\n".join([head, *rows]) + "\n0,801,0.0")
    news = [
        {"note": f"south is away {HOSTILE}", "warning": True},
        {"round": 800, "seed": 0, "variant": "", "answered": ["north"], "missing": {"south": "no"}},
    ]
    (going / NEWS).write_text("\n".join(map(json.dumps, news)) + '\n{"not')
    return place


@pytest.fixture
def address(folder):
    with watch(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_runs_are_read_while_they_go_on(folder):
    first, second = runs_in(folder)
    assert (first["key"], first["status"], first["round"]) == ("first", "finished", 12)
    assert (second["key"], second["status"]) == ("second", "running")
    assert (second["round"], second["rounds"], second["tolerance"]) == (800, 900, 0.05)
    h = second["history"]
    assert len(h["round"]) == MOST_POINTS
    assert (h["round"][0], h["round"][-1], h["bytes"][-1]) == (1, 800, 240000)
    assert (second["answered"], second["missing"]) == (["north"], ["south: no"])
    assert second["notes"] == [{"text": f"south is away {HOSTILE}", "alarm": True}]
    (alone,) = runs_in(folder / "first")
    assert alone["history"] == first["history"]


def test_only_this_machine_is_answered(address):
    with urllib.request.urlopen(f"{address}/data") as reply:
        tag = reply.headers["ETag"]
        assert len(json.load(reply)) == 2
    for headers, path, status in (
        ({"If-None-Match": tag}, "data", 304),
        ({"Host": "evil.example:80"}, "data", 403),
        ({}, "etc/passwd", 404),
        ({}, "../data", 404),
    ):
        asked = urllib.request.Request(f"{address}/{path}", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as found:
            urllib.request.urlopen(asked)
        assert found.value.code == status
        found.value.close()
    assert address.startswith("http://127.0.0.1:")
    with pytest.raises(fs.InvalidInput, match="There is no folder nowhere"):
        watch("nowhere")
    taken = int(address.rpartition(":")[2])
    with pytest.raises(fs.InvalidInput, match=f"Cannot use port {taken}"):
        watch(".", taken)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["1200,900", "360,900"])
def test_the_page_in_a_browser(address, size, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium on this machine")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    words += [f"--user-data-dir={tmp_path}", f"--window-size={size}", "--virtual-time-budget=3000"]
    done = subprocess.run(
        [browser, *words, "--dump-dom", address], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    text = done.stdout
    assert text.count("<figure") >= 3
    assert 'data-name="objective"' in text
    assert 'data-name="constraint"' in text
    assert "1 running of 2" in text
    assert "without south: no" in text
    assert "answered: north" in text
    assert "<img" not in text  # notes are text
    assert "stroke-dasharray" in text  # the tolerance


K = np.arange(1, 201)
FALLING = {"round": K, "objective": 10 - K / 100}


@pytest.mark.parametrize(
    ("history", "tolerance", "parts"),
    [
        ({"round": K, "objective": 1 / K}, 0, ["f has settled."]),
        (FALLING, 0, ["f still falls: try more rounds."]),
        (FALLING | {"constraint": np.full(200, 0.1)}, 0.2, ["Feasible (g = 0.1 ≤ 0.2)", "falls"]),
        (
            {"round": K, "objective": 1 / K, "constraint": np.full(200, 0.3), "switch": K % 2},
            0.2,
            ["Not feasible at the end (g = 0.3 > 0.2)", "a two-cycle of f and g", "soft switching"],
        ),
        (
            {"round": K, "objective": 1 / K, "constraint": 0.2 + 0.1 * (-1.0) ** K},
            0.2,
            ["Not feasible at the end", "in 50 % of the last", "g oscillates"],
        ),
        ({"round": K, "objective": 1 + 0.1 * (-1.0) ** K}, 0, ["f oscillates", "a smaller step"]),
        (
            {"round": K, "objective": 1 / K, "constraint": np.full(200, 0.3)},
            0.2,
            ["settled", "a larger step for g"],
        ),
        ({"round": K[:5], "objective": 1 / K[:5]}, 0, []),
        ({"round": K, "objective": np.full(200, np.nan)}, 0, []),
    ],
)
def test_a_run_is_judged_in_one_sentence(history, tolerance, parts):
    said = judgement(history, tolerance)
    assert bool(said) == bool(parts)
    assert all(part in said for part in parts), said
    assert said.count(". ") == 0


def test_small_noise_is_not_called_an_oscillation():
    noise = 1e-4 * (-1.0) ** K
    assert "oscillates" not in judgement({"round": K, "objective": 1 / K + noise}, 0)
