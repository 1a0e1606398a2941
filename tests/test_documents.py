"""What the documents show must work as it stands there."""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int8

import examples
import fedsolve as fs

ROOT = Path(__file__).parent.parent


def blocks(name):
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)


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
    away, near = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[-2:])
    assert near < 0.2 * away


def test_the_fedadmm_page_runs(capsys):
    names = {}
    for block in blocks("docs/fedadmm.md"):
        exec(block, names)
    averagings, communications = map(int, capsys.readouterr().out.split())
    assert communications == 2 * averagings < 200


TUTORIALS = sorted(path.stem for path in (ROOT / "docs/tutorials").glob("*.md"))


@pytest.mark.parametrize("page", ["start", *(f"tutorials/{name}" for name in TUTORIALS)])
def test_the_start_and_the_tutorials_work(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks(f"docs/{page}.md"):
        exec(block, names)


def test_the_papers_lines_are_in_our_files():
    page = (ROOT / "docs/lines.md").read_text(encoding="utf-8")
    for section in page.split("\n## ")[1:]:
        (file,) = re.findall(r"— `(algorithms/\w+\.py)`", section)
        source = (ROOT / "src/fedsolve" / file).read_text(encoding="utf-8")
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


def test_the_page_on_runs_works():
    (example,) = blocks("docs/runs.md")
    exec(example, {})


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
