"""Examples, commands and links in the documents work as they are printed."""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import tomli_w
import typer
from jaxtyping import Array, Float, Int8

import fedsolve as fs
from fedsolve.cli import main as cli
from fedsolve.experiments import config
from fedsolve.flare.site_config import check_data
from fedsolve.papers import reproduce
from fedsolve.problems.fairness import from_tables
from tests.support import examples
from tests.support.documents import ROOT, blocks


def test_the_readmes_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = blocks("README.md")
    exec(example, {})
    shown = capsys.readouterr().out.split()
    assert 0 < float(shown[0]) < 0.1
    assert int(shown[2]) == 500 * 10 * (4 + 3 * 4 + 3)
    assert (tmp_path / "np.png").stat().st_size > 10_000


def test_the_contributing_examples_work():
    names = {"fs": fs, "jnp": jnp, "np": np, "eqx": eqx, "Array": Array}
    names |= {"Float": Float, "Int8": Int8}
    for block in blocks("CONTRIBUTING.md"):
        exec(block, names)
    problem = names["mean_estimation"]()
    run = fs.solve(problem, names["GradientDescent"](0.5), rounds=60)
    expected = problem.samples.values["points"].mean(axis=(0, 1))
    np.testing.assert_allclose(run.params, expected, atol=1e-5)
    assert run.history["slope"][-1] < 1e-5

    sign, v = names["Sign"](), jnp.asarray([3.0, -1.0, 2.0])
    packet = sign(v)
    np.testing.assert_allclose(packet.dense(), [2, -2, 2])
    assert packet.nbytes == 4 + 3
    assert jnp.sum((packet.dense() - v) ** 2) <= (1 - sign.contraction(3)) * jnp.sum(v**2)
    feedback = fs.FedSGM(0.02, uplink=sign)
    history = fs.solve(examples.least_squares(constrained=False), feedback, rounds=100).history
    assert history["objective"][-1] < 0.5 * history["objective"][0]


def test_the_theory_pages_examples_run(capsys):
    names = {}
    for block in blocks("docs/theory.md"):
        exec(block, names)
    assert "Theorem 3 (Theorem 1, full participation): kept" in capsys.readouterr().out
    assert len(names["run"].history["skewness.local"]) == 4
    assert names["found"].accuracy <= 1e-4


def test_the_first_example_of_the_docs_runs():
    names = {}
    exec(blocks("docs/index.md")[0], names)
    assert names["run"].rounds == 500
    jax.tree.leaves(names["run"].params)


def test_the_page_on_games_works(capsys):
    names = {}
    for block in blocks("docs/games.md"):
        exec(block, names)
    assert "exact=True" in capsys.readouterr().out


def test_the_participation_page_works(capsys):
    names = {}
    for block in blocks("docs/participation.md"):
        exec(block, names)
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    (away,) = (float(line[1]) for line in said if line[0] == "False")
    (near,) = (float(line[1]) for line in said if line[0] == "True")
    assert near < 0.2 * away


def test_the_fedadmm_page_runs(capsys):
    names = {}
    for block in blocks("docs/fedadmm.md"):
        exec(block, names)
    averagings, communications = map(int, capsys.readouterr().out.split())
    assert communications == 2 * averagings < 200


OWN_TEST = {"torch"}  # needs a data set, and files beside it
PAGES = {path.stem for path in (ROOT / "docs/tutorials").glob("*.md")}
TUTORIALS = sorted(PAGES - OWN_TEST)


LONG = {"selection", "payment"}  # more than five seconds


def page_of(name):
    marks = [pytest.mark.slow] if name in LONG else []
    return pytest.param(f"tutorials/{name}", id=f"tutorials/{name}", marks=marks)


@pytest.mark.parametrize("page", ["start", *map(page_of, TUTORIALS)])
def test_the_start_and_the_tutorials_work(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(f"docs/{page}.md"):
        exec(block, names)


def test_the_papers_lines_are_in_our_files():
    page = (ROOT / "docs/lines.md").read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        files = re.findall(r"`(algorithms/\w+\.py)`", section.splitlines()[0])
        source = "".join((ROOT / "src/fedsolve" / f).read_text(encoding="utf-8") for f in files)
        rows = [line for line in section.splitlines() if line.startswith("|")][2:]
        quoted = [code for row in rows for code in re.findall(r"`([^`]+)`", row.split("|")[-2])]
        assert len(quoted) >= len(rows) - 1
        assert [code for code in quoted if code not in source] == []


SAID = (
    "is not finite; a smaller step may help.",
    " is not a known ",
    ", but there are only ",
    "is not an average over samples (client ",
    "The downlink must be contractive, as EF21-P needs it: ",
    "exists and is not empty; choose another folder with --out.",
    "belongs to another run: ",
    ": the same numbers",
    "Another process is working in ",
    "No checkpoint after round ",
    " does not answer (",
)


def test_the_errors_that_are_explained_are_those_that_are_raised():
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    files = (ROOT / "src/fedsolve").rglob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [text for text in SAID if text not in page or text not in source] == []


def test_every_page_is_in_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if page not in listed} == set()


def test_the_page_on_runs_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks("docs/runs.md"):
        exec(block, names)
    assert (tmp_path / "switching.pdf").exists()


def test_the_page_on_scale_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks("docs/scale.md"):
        exec(block, names)
    assert names["run"].history["objective"][-1] < 0.5 * names["run"].history["objective"][0]
    assert (tmp_path / "states" / "rows").exists()


def test_the_page_on_time_works():
    names = {}
    (example,) = blocks("docs/time.md")
    exec(example, names)
    history = names["run"].history
    assert (history["seconds"] > 0.25 / 2).all()
    assert history["seconds_total"][-1] > 50 * 0.1


@examples.needs_data("cifar10")
def test_the_page_on_images_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSOLVE_DATA", str(examples.DATA))
    names = {}
    for block in blocks("docs/images.md"):
        exec(block, names)
    assert 0 <= float(capsys.readouterr().out) <= 1
    assert names["other"].head.weight.shape == (7, 32)


@pytest.fixture
def few_rounds(monkeypatch):
    """Where a page runs hundreds of rounds, which take minutes, its block runs as it stands for
    three."""
    solve = fs.solve
    monkeypatch.setattr(fs, "solve", lambda *a, rounds, **o: solve(*a, rounds=min(rounds, 3), **o))


@examples.needs_data("mnist")
def test_the_page_on_data_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSOLVE_DATA", str(examples.DATA))
    names = {}
    pytest.importorskip("torch")
    for block in blocks("docs/data.md"):
        exec(block, names)
    assert sum(map(len, names["parts"])) == 60_000
    assert (tmp_path / "who-has-what.png").stat().st_size > 10_000


@examples.needs_data("adult")
def test_the_page_on_fairness_works(monkeypatch, few_rounds):
    monkeypatch.setenv("FEDSOLVE_DATA", str(examples.DATA))
    names = {}
    (example,) = blocks("docs/fairness.md")
    exec(example, names)
    assert names["run"].rounds == 3


@pytest.mark.slow  # CartPole compiles for long; problems/test_cartpole.py runs the like
def test_the_page_on_cartpole_works(few_rounds):
    names = {}
    (example,) = blocks("docs/cartpole.md")
    exec(example, names)
    assert np.isfinite(names["run"].history["reward"]).all()


def test_the_page_on_problems_works():
    """Its functions and data are the reader's own: here a least-squares problem's."""
    own = examples.least_squares().samples.values
    names = {"f": examples.quadratic, "g": examples.half_space, "data": own, "w0": np.zeros(5)}
    any_problem, network, equinox, flax, exported = blocks("docs/problems.md")
    exec(any_problem, names)
    assert names["problem"].n == 6
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((3, 20, 30)), rng.integers(0, 2, (3, 20))
    names |= {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    for block, package in ((network, "torch"), (equinox, "equinox"), (flax, "flax")):
        if importlib.util.find_spec(package) is not None:
            exec(block, names)
            objective = names["run"].history["objective"]
            assert objective[-1] < objective[0]
    assert isinstance(names["trained"], names["Net"])
    exec(exported, names)
    assert names["fitted"].score(x[0], y[0]) > 0.8


def test_the_page_on_constraints_works(capsys):
    names = {}
    for block in blocks("docs/constraints.md"):
        exec(block, names)
    assert names["bound"].bound == 0.9
    assert "True" in capsys.readouterr().out.splitlines()[0]
    (file,) = blocks("docs/constraints.md", "toml")
    tables = tomllib.loads(file)["problem"]["constraint"]
    both = from_tables(tables, {"race and sex": ("code", ["a", "b"])})
    assert isinstance(both, fs.Several)
    assert both.tolerances == (0.0, 0.01)


def test_the_page_on_training_works():
    names = {}
    for block in blocks("docs/training.md"):
        exec(block, names)
    assert names["run"].client_params(3)["head"].shape == (3,)
    assert names["run"].history["objective"][-1] < names["run"].history["objective"][0]


def test_the_page_on_audits_works(capsys):
    for block in blocks("docs/audit.md"):
        exec(block, {})
    assert "met" in capsys.readouterr().out


def test_the_page_on_payments_works():
    names = {}
    for block in blocks("docs/payments.md"):
        exec(block, names)


def test_the_page_on_results_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks("docs/use-results.md"):
        exec(block, names)
    assert names["weights"].shape == names["problem"].params.shape


PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
)


def test_every_page_with_python_is_run():
    """By a test of its own, here or in the tests of its topic, or with the tutorials."""
    tests = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    run = {*re.findall(r'blocks\("([^"]+)"\)', tests), "docs/start.md"}
    run |= {f"docs/tutorials/{name}.md" for name in TUTORIALS}
    assert {page for page in PAGES if blocks(page)} == run


def commands_of(page):
    """The commands of a page's shell blocks, as words, without what is set up around them."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    found = [shlex.split(part, comments=True) for line in lines for part in line.split("&&")]
    return [[words[0].removeprefix(".venv/bin/"), *words[1:]] for words in found if words]


ELSEWHERE = {
    "python3": "CI itself runs the README's",
    "pip": "it needs a network",
    "pytest": "CI itself runs it",
    "export": "it is for the commands below it",
    "uvx": "it needs a network",
}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")])
def test_commands_that_are_shown_exist(page):
    """Their options are known, and what they name is there. They are not run here: those that take
    seconds are run by the next test and by the tests of the command line, checkpoints, trackers and
    deployments with fewer rounds; the others take minutes, data or several machines."""
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for command, *words in commands_of(page):
        if command == "python":
            assert (ROOT / words[0]).is_file()
        elif command == "fedsolve":
            name, *rest = words
            told = commands[name].make_context(name, list(rest)).params
            if name in ("run", "show") and told["name"] is not None:
                check_experiment(told["name"], told["set"])
            elif name == "deploy" and (told["local"] or told["what"] == "submit"):
                check_experiment(told["target"] or told["what"], told["set"])
            elif name == "reproduce" and told["name"] is not None:
                reproduce.find(told["name"])
        else:
            assert command in ELSEWHERE, words


def check_experiment(name, changes):
    if not name.isupper() and not name.endswith(".toml"):  # else it is the reader's own
        table = config.read(name)
        for change in changes or []:
            table = config.override(table, change)


def test_the_first_commands_work(fedsolve, tmp_path):
    """Those of the start page, one after the other, as they stand there."""
    for command, *words in commands_of("docs/start.md"):
        if command == "fedsolve":
            status, _, told = fedsolve(*words)
            assert status == 0, told
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "neyman-pearson",
        "neyman-pearson-2",
    }
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_files_that_are_shown_are_understood(tmp_path):
    """Whole experiments, parts of one, federations, and what a site's owner writes."""
    own = ("tutorials/torch", "tutorials/hospitals", "tables", "constraints")
    own_tests = [f"docs/{name}.md" for name in own]
    pages = [page for page in PAGES if page not in own_tests]
    shown = [tomllib.loads(block) for page in pages for block in blocks(page, "toml")]
    assert len(shown) >= 5
    for table in shown:
        if "sites" in table:
            assert table.keys() == {"server", "port", "sites"}
        elif "data" in table:
            (tmp_path / "site.toml").write_text(tomli_w.dumps(table))
            check_data(tmp_path / "site.toml")
        else:
            config.resolve("shown", config.read("neyman-pearson") | table)


@pytest.mark.slow
def test_the_tutorial_on_deployment_works(tmp_path):
    """Its file and its commands, as they stand there: a simulation, and a real federation."""
    pytest.importorskip("nvflare")
    (file,) = blocks("docs/tutorials/deploy.md", "toml")
    (tmp_path / "trial.toml").write_text(file)
    for command, *words in commands_of("docs/tutorials/deploy.md"):
        assert command == "fedsolve"
        done = [sys.executable, "-m", "fedsolve", *words]
        subprocess.run(done, cwd=tmp_path, check=True, timeout=300)
    one, other = (
        pd.read_csv(tmp_path / f"runs/{n}/history.csv") for n in ("trial", "trial-deployed")
    )
    for name in other:
        np.testing.assert_allclose(one[name], other[name], atol=1e-10, err_msg=name)
    assert (tmp_path / "both.html").exists()
