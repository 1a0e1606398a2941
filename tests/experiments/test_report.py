"""The report shows the numbers of the files, and nothing that a user named becomes HTML."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import tomli_w
from safetensors.numpy import load_file, save_file

import fedsolve as fs
from fedsolve.experiments.report import report
from fedsolve.plots import plot

HOSTILE = '</script><script>document.title="bad"</script><img src=x onerror=alert(1)>&lt;'
ROUNDS, CLIENTS = 450, 5
CHARTS = ["objective", "constraint", "switch", "compression_error", "uplink_error"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as `fedsolve run` leaves it: two variants, two seeds."""
    path = tmp_path_factory.mktemp("runs") / "x"
    path.mkdir()
    config = {
        "problem": {"kind": "neyman_pearson", "clients": CLIENTS},
        "algorithm": {"kind": "FedSGM", "tolerance": 0.05, "switching": {"kind": "Hard"}},
        "run": {"rounds": ROUNDS, "seeds": [0, 1]},
        "variants": {"plain": {}, HOSTILE: {"algorithm.tolerance": 0.1}},
    }
    (path / "config.toml").write_text(tomli_w.dumps(config))
    said = {"plain/seed-1": f"Nobody gains {HOSTILE}."}
    facts = {"status": "finished", "certificates": said, "tolerances": {"plain/seed-0": 0.07}}
    (path / "run.json").write_text(json.dumps(facts))
    rng, frames, wide = np.random.default_rng(0), [], {}
    for variant in config["variants"]:
        for seed in (0, 1):
            entries = {"variant": variant, "seed": seed, "round": np.arange(1, ROUNDS + 1)}
            for name in CHARTS:
                entries[name] = rng.random(ROUNDS)
            for way in ("up", "down"):
                entries[f"bytes_{way}_total"] = np.cumsum(rng.integers(1, 99, ROUNDS))
            entries["messages_up_total"] = entries["messages_down_total"] = 2 * entries["round"]
            if variant == "plain":
                entries["seconds_total"] = np.cumsum(rng.random(ROUNDS))
            frames.append(pd.DataFrame(entries))
            drawn = np.array([rng.choice(CLIENTS, 2, replace=False) for _ in range(ROUNDS)])
            wide[f"{variant}/seed-{seed}/cohort"] = drawn
            wide[f"{variant}/seed-{seed}/weights"] = rng.random((ROUNDS, 2))
            wide[f"{variant}/seed-{seed}/participation"] = rng.random((ROUNDS, CLIENTS))
            wide[f"{variant}/seed-{seed}/participation/settles"] = rng.random(CLIENTS)
    frames[0].loc[3, "objective"] = np.inf
    pd.concat(frames).to_csv(path / "history.csv", index=False)
    save_file(wide, path / "history.safetensors")
    return path


@pytest.fixture(scope="module")
def page(folder):
    report([folder], folder.parent / "report.html")
    return folder.parent / "report.html"


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.data, self.inside = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.data.append(data)


def embedded(page):
    text = page.read_text()
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_the_numbers_are_those_of_the_files(page, folder):
    groups = embedded(page)
    table = pd.read_csv(folder / "history.csv")
    assert [g["name"] for g in groups] == ["plain", HOSTILE]
    assert [g["tolerance"] for g in groups] == [0.07, 0.1]  # as it was, else as it was asked for
    for group in groups:
        for each in group["seeds"]:
            rows = table[(table["variant"] == group["name"]) & (table["seed"] == each["seed"])]
            for name, values in each["history"].items():
                expected = rows[name].replace(np.inf, np.nan).to_numpy(float)
                np.testing.assert_array_equal(np.array(values, float), expected)
    cohort = pd.Series({c["name"]: c for c in groups[0]["clients"]})
    assert sorted(cohort.index) == ["cohort", "participation"]  # weights are of who was drawn
    settles = load_file(folder / "history.safetensors")["plain/seed-0/participation/settles"]
    assert cohort["participation"]["settles"] == settles.tolist()
    assert [g["certificates"] for g in groups] == [[f"Seed 1: Nobody gains {HOSTILE}."], []]
    shares, steps = cohort["cohort"], np.diff(cohort["cohort"]["rounds"], prepend=0)
    assert shares["rounds"][-1] == ROUNDS
    np.testing.assert_allclose(np.sum(shares["values"], axis=1), 2)  # two of them a round
    assert np.sum(np.array(shares["values"]) * steps[:, None]) == pytest.approx(2 * ROUNDS)


def test_nothing_is_fetched_and_no_name_becomes_html(page):
    found = Tags(page.read_text())
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert not {"img", "link", "iframe"} & {tag for tag, _ in found.tags}
    assert not [a for _, a in found.tags if {"src", "href", "onerror"} & a.keys()]
    addresses = set(re.findall(r"https?://[^\s\"']+", page.read_text()))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_two_folders_are_distinguished(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "y")
    report([folder, tmp_path / "y"], tmp_path / "two.html")
    assert [g["name"] for g in embedded(tmp_path / "two.html")][::2] == ["x: plain", "y: plain"]


def test_an_invalid_run_folder_raises(folder, tmp_path):
    with pytest.raises(fs.InvalidInput, match="is not the folder of a finished run: it has no co"):
        report([tmp_path], tmp_path / "r.html")
    with pytest.raises(fs.InvalidInput, match=r"Cannot write to .*: No such file"):
        report([folder], tmp_path / "nowhere" / "r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(fs.InvalidInput, match=r"cannot be read"):
        report([tmp_path / "file"], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def in_a_browser(page, script="", *words):
    """The document as Chromium has made it; nothing may be said on its console. A script of the
    test's own comes after the page's, and says what it found to `answer`."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium on this machine")
    if script:
        text = "const answer = found => document.body.dataset.found = JSON.stringify(found);"
        scripted = page.with_name("scripted.html")
        own = f"<script>{text}(() => {{{script}}})()</script></body>"
        scripted.write_text(page.read_text().replace("</body>", own))
        page = scripted
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *words]
    done = subprocess.run(
        [browser, *words, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return done.stdout


def found_by(script, page, *words):
    """What the script answered."""
    tags = Tags(in_a_browser(page, script, *words)).tags
    return json.loads(next(attrs["data-found"] for tag, attrs in tags if tag == "body"))


def test_it_renders_in_a_browser(page, folder):
    text = in_a_browser(page)
    dom = Tags(text)
    assert re.search(r"<title>(.*?)</title>", text)[1] == "Fedsolve report"
    assert "img" not in {tag for tag, _ in dom.tags}
    assert HOSTILE.replace("&lt;", "<") in "".join(dom.data).replace("&lt;", "<")
    assert "plain. Seed 1: Nobody gains " in "".join(dom.data)  # its certificate
    charts = [a.get("data-name") for tag, a in dom.tags if tag == "figure"]
    assert charts[:5] == CHARTS
    assert sorted(charts[5:]) == ["cohort", "cohort", "participation", "participation"]
    shown = [a["data-value"] for tag, a in dom.tags if tag == "td" and "data-value" in a]
    last = pd.read_csv(folder / "history.csv").groupby(["variant", "seed"], sort=False).tail(1)
    expected = last[["seed", "round", "objective", "constraint"]].to_numpy()
    np.testing.assert_array_equal(np.array(shown).reshape(4, -1)[:, :4].astype(float), expected)
    axes = ["round", "messages_both_ways", "bytes, both ways", "bytes_up_total", "bytes_down_total"]
    options = [a.get("value") for tag, a in dom.tags if tag == "option"]
    assert options[:6] == [*axes, "seconds_total"]
    lines = [a.get("class") for tag, a in dom.tags if tag == "line"]
    assert lines.count("settles") == 2 * CLIENTS
    assert "differs" in [a.get("class") for tag, a in dom.tags if tag == "tr"]


def test_the_keyboard_reads_the_numbers_and_chooses_what_is_shown(page, folder):
    found = found_by(
        """
        const press = (node, key, more = {}) => node.dispatchEvent(
          new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more }));
        const charts = () => [...document.querySelectorAll("figure")].map(f => f.dataset.name);
        const chart = document.querySelector("figure[data-name=objective] svg");
        chart.focus();
        const focused = document.activeElement === chart, read = [];
        const keys = [["ArrowRight"], ["ArrowRight"], ["ArrowRight", { shiftKey: true }],
          ["ArrowLeft"], ["End"], ["Home"]];
        for (const [key, more] of keys) { press(chart, key, more);
          read.push(chart.parentNode.querySelector(".read").textContent); }
        const reachable = [...document.querySelectorAll("button, select, input, svg[tabindex]")]
          .every(node => node.tabIndex === 0);
        const button = document.querySelector("#legend button"), all = charts().length;
        button.click();
        const fewer = [charts().length, button.getAttribute("aria-pressed")];
        answer({ focused, read, reachable, all, fewer });
        """,
        page,
    )
    assert found["focused"]
    assert found["reachable"]
    assert found["all"] == 9
    assert found["fewer"] == [7, "false"]  # two are of the hidden one's clients
    table = pd.read_csv(folder / "history.csv")
    rows = table[table["variant"] == "plain"].pivot(
        index="round", columns="seed", values="objective"
    )
    far = int(ROUNDS / 20 + 0.5)
    steps = [1, 2, 2 + far, 1 + far, ROUNDS, 1]
    for number, told in zip(steps, found["read"], strict=True):
        assert told.startswith(f"round {number}:  plain ")
        shown = [float(x) for x in re.findall(r"[\d.e-]+", told.split("plain")[1])[:3]]
        here = rows.loc[number].to_numpy()
        np.testing.assert_allclose(shown, [here.mean(), here.min(), here.max()], rtol=1e-4)


def test_by_bytes_and_by_time_its_curves_are_those_of_the_pictures(page, folder):
    found = found_by(
        """
        const curves = {};
        for (const across of ["round", "bytes_up_total", "seconds_total"]) {
          byId("across").value = across; curves[across] = curve(groups[0], "constraint"); }
        answer(curves);
        """,
        page,
    )
    table = pd.read_csv(folder / "history.csv")
    plain = table[table["variant"] == "plain"].drop(columns="variant")
    histories = [{k: v.to_numpy() for k, v in rows.items()} for _, rows in plain.groupby("seed")]
    algorithm = fs.FedAvg(0.1)
    runs = [SimpleNamespace(history=h, rounds=ROUNDS, algorithm=algorithm) for h in histories]
    for across, shown in found.items():
        axis = plot({"plain": runs}, panels=["constraint"], against=across).axes[0]
        x, mean = axis.lines[0].get_data()
        np.testing.assert_allclose(shown["x"], x, rtol=1e-12)
        np.testing.assert_allclose(shown["mean"], mean, rtol=1e-9)
        assert np.all(np.array(shown["low"]) <= mean)
        assert np.all(np.array(shown["high"]) >= mean)


@pytest.mark.parametrize(("scheme", "number"), [("light", 1), ("dark", 0)])
def test_text_and_lines_stand_out_in_light_and_dark(page, scheme, number):
    """Contrast as WCAG has it: 4.5 for text, 3 for what is drawn and for the focus; the yellow and
    the sky blue of the colour-blind's seven are light, and are told apart by the legend as well."""
    found = found_by(
        """
        const color = (node, what) => getComputedStyle(node)[what];
        const body = document.body, chart = document.querySelector("svg[tabindex]");
        answer({ scheme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
          back: color(body, "backgroundColor"), texts: [color(body, "color"),
          color(document.querySelector(".read"), "color"),
          color(chart.querySelector("text"), "fill")],
          marked: color(document.querySelector("tr.differs td"), "backgroundColor"),
          tolerance: color(document.querySelector(".tolerance"), "stroke"), lines: colors });
        """,
        page,
        f"--blink-settings=preferredColorScheme={number}",
    )
    assert found["scheme"] == scheme
    for text in found["texts"]:
        assert contrast(text, found["back"]) >= 4.5
    assert contrast(found["texts"][0], found["marked"]) >= 4.5
    assert contrast(found["tolerance"], found["back"]) >= 3
    visible = [contrast(line, found["back"]) >= 3 for line in found["lines"]]
    assert sum(visible) >= 5


def contrast(one, other):
    def luminance(color):
        if color.startswith("#"):
            channels = [int(color[k : k + 2], 16) for k in (1, 3, 5)]
        else:
            channels = [float(x) for x in re.findall(r"[\d.]+", color)[:3]]
        scaled = np.array(channels) / 255
        linear = np.where(scaled <= 0.04045, scaled / 12.92, ((scaled + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_the_command_writes_the_page(fedsolve, folder, tmp_path):
    status, told, _ = fedsolve("report", folder, "-o", "page.html")
    assert (status, "Written to page.html" in told) == (0, True)
    assert len(embedded(tmp_path / "page.html")) == 2
    status, _, told = fedsolve("report", "nothing")
    assert status == 2
    assert "nothing is not the folder of a finished run" in told


def test_a_theorems_bound_is_shown_beside_the_measured_value(fedsolve, tmp_path):
    (tmp_path / "x.toml").write_text(
        """
        problem = { kind = "neyman_pearson", clients = 3, radius = 5.0, level = 0.05 }
        run = { rounds = 200, evaluate_every = 200 }
        [algorithm]
        kind = "FedSGM.from_theory"
        lipschitz = 4.0
        """
    )
    assert fedsolve("run", "x.toml", "--out", "x")[0] == 0
    problem = fs.problems.neyman_pearson(clients=3, radius=5.0, level=0.05)
    algorithm = fs.FedSGM.from_theory(problem, 200, lipschitz=4.0)
    run = fs.solve(problem, algorithm, 200, evaluate_every=200)
    report([tmp_path / "x"], tmp_path / "page.html")
    (group,) = embedded(tmp_path / "page.html")
    assert group["certificates"] == [f"Seed 0: {run.certificate()}"]
    assert "kept\n  f(w̄) − f*" in group["certificates"][0]
    assert group["tolerance"] == pytest.approx(algorithm.guarantee.tolerance)
    assert f"promised {algorithm.guarantee.bound:.6g}" in group["certificates"][0]
    status, _, told = fedsolve("run", "--resume", "x", "--rounds", 300)  # another theorem's step
    assert (status, "belongs to another run: algorithm differ" in told) == (2, True)
    assert fedsolve("run", "--resume", "x")[0] == 0  # the folder is as it was
    for change, sentence in {
        "algorithm.lipshitz=4.0": "'lipshitz' is not a constant of the theorems: distance, ",
        "algorithm.step_size=0.1": "'step_size' is not a constant of the theorems",
        "run.instances=true": "FedSGM.from_theory is for one problem; leave out run.instances.",
    }.items():
        status, _, told = fedsolve("run", "x.toml", "--set", change)
        assert (status, sentence in " ".join(told.split())) == (2, True), told


@pytest.mark.slow
def test_twenty_runs_of_ten_thousand_rounds_stay_drawable(tmp_path):
    """However long runs are, a line has at most four points for each of its pixels."""
    (tmp_path / "x").mkdir()
    rng, rounds = np.random.default_rng(0), np.arange(1, 10_001)
    config = {"problem": {"kind": "p"}, "algorithm": {"kind": "a"}, "run": {"rounds": 10_000}}
    config["variants"] = {f"variant {k}": {} for k in range(20)}
    (tmp_path / "x/config.toml").write_text(tomli_w.dumps(config))
    (tmp_path / "x/run.json").write_text("{}")
    table = [
        {"variant": name, "seed": 0, "round": rounds}
        | {key: rng.random(10_000).round(4) for key in ("objective", "constraint", "switch")}
        for name in config["variants"]
    ]
    pd.concat(map(pd.DataFrame, table)).to_csv(tmp_path / "x/history.csv", index=False)
    report([tmp_path / "x"], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 10_000_000
    page = tmp_path / "page.html"
    seconds = found_by(
        """
        const took = what => { const began = performance.now(); what();
          document.body.getBoundingClientRect(); return (performance.now() - began) / 1000; };
        const chart = () => document.querySelector("svg[tabindex]");
        answer({ hide: took(() => document.querySelector("#legend button").click()),
          other: took(() => { byId("log").click(); }),
          key: took(() => chart().dispatchEvent(new KeyboardEvent("keydown", { key: "End" }))),
          pointer: took(() => chart().dispatchEvent(
            new PointerEvent("pointermove", { clientX: 300, clientY: 200 }))) });
        """,
        page,
    )
    print(seconds)  # pytest -s; docs/runs.md has them
    # A key is answered at once, whatever the machine: it redraws nothing. The rest is seen to end.
    assert max(seconds["key"], seconds["pointer"]) < max(seconds["hide"], seconds["other"]) / 5
    assert max(seconds.values()) < 10
    drawn = Tags(in_a_browser(page))
    paths = [a["d"] for tag, a in drawn.tags if tag == "path" and a.get("class") != "over"]
    assert len(paths) == 3 * 20
    assert max(len(re.findall("[ML]", d)) for d in paths) <= 4 * 600


SITES = {
    "clients": 8,
    "missing": {"south": "it missed rounds 101 to 450, since then: no answer"},
    "alarms": {"south": [f"its answer is too large: {HOSTILE}"]},
    "sites": {
        "north": {
            "clients": 5,
            "asked": 450,
            "answered": 449,
            "refused": 1,
            "absent": 0,
            "evaluated": True,
            "why": "",
            "missed": [{"from": 7, "to": 7, "why": HOSTILE, "at": "then"}],
        },
        "south": {
            "clients": 3,
            "asked": 450,
            "answered": 100,
            "refused": 0,
            "absent": 350,
            "evaluated": False,
            "why": "no answer",
            "missed": [{"from": 101, "to": 450, "why": "no answer", "at": "then"}],
        },
    },
}


@pytest.fixture
def deployed(folder, tmp_path):
    """A folder whose first run was deployed: a site was missing from round 101 on."""
    shutil.copytree(folder, tmp_path / "deployed")
    facts = json.loads((tmp_path / "deployed/run.json").read_text())
    facts |= {"status": "incomplete", "participation": {"plain/seed-0": SITES}}
    (tmp_path / "deployed/run.json").write_text(json.dumps(facts))
    table = pd.read_csv(tmp_path / "deployed/history.csv")
    table["clients_evaluated"] = 8
    first = (table["variant"] == "plain") & (table["seed"] == 0)
    table.loc[first & (table["round"] > 100), "clients_evaluated"] = 5
    table.to_csv(tmp_path / "deployed/history.csv", index=False)
    report([tmp_path / "deployed"], tmp_path / "deployed.html")
    return tmp_path / "deployed.html"


def test_a_deployed_runs_sites_are_in_the_page(deployed):
    plain, other = embedded(deployed)
    assert plain["status"] == "incomplete"
    assert [seed.get("total") for seed in plain["seeds"]] == [8, None]
    (sites,) = plain["sites"]
    assert (sites["seed"], sites["rounds"], other["sites"]) == (0, ROUNDS, [])
    north, south = sites["rows"]
    assert (north["name"], north["clients"], north["counts"]) == ("north", 5, [450, 449, 1, 0])
    assert north["missed"] == [[7, 7, HOSTILE]]
    assert (north["without"], south["without"]) == ("", SITES["missing"]["south"])
    assert (north["alarms"], south["alarms"]) == ([], SITES["alarms"]["south"])
    assert south["missed"] == [[101, 450, "no answer"]]


def test_a_strip_shows_who_answered(deployed, folder):
    """Red where a site missed rounds; within the tolerance only where all clients were heard."""
    text = in_a_browser(deployed)
    dom = Tags(text)
    assert "img" not in {tag for tag, _ in dom.tags}
    bars = [a for tag, a in dom.tags if tag == "rect" and a.get("class") == "missed"]
    assert len(bars) == 2
    wide = float(bars[1]["width"]) / (600 - 110 - 12)
    assert wide == pytest.approx(350 / 450, abs=0.01)
    shown = "".join(dom.data)
    assert "south (3 clients): asked in 450 rounds, answered 100, absent from 350" in shown
    assert "Missing at the end: it missed rounds 101 to 450" in shown
    cells = [a["data-value"] for tag, a in dom.tags if tag == "td" and "data-value" in a]
    rows = np.array(cells).reshape(4, -1)
    assert rows[:, 2].tolist() == ["5 of 8", "all", "all", "all"]
    assert rows[0, 6] == "unknown"
    assert all(cell.endswith(" %") for cell in rows[1:, 6])
