"""Model cards: what a trained model is, on which data, by which algorithm, and how well."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import equinox as eqx
import jax
import numpy as np

from fedsolve.algorithms.base import Algorithm
from fedsolve.problem.layout import FROZEN, PERSONAL, SHARED, Layout, is_parameter, name_of
from fedsolve.problem.problem import Problem
from fedsolve.problem.samples import counts
from fedsolve.runtimes.history import History
from fedsolve.solving.result import Run
from fedsolve.types import PyTree, Table

FILE = "model_card.md"
AUDITS = "\n## Audit on held-out data\n"  # the last section, if there is one
COSTS = ("bytes_", "messages_", "vectors_", "seconds_")  # columns of the history
MOST = 30  # arrays of a model and entries of data that are listed


def model_card(
    groups: Mapping[str, Sequence[Run]],
    title: str,
    facts: Table,
    data_here: bool = True,
) -> str:
    """Return the card of an experiment's runs in Markdown.

    Args:
        groups: The runs of each variant, one for each seed.
        title: The heading.
        facts: What `run.json` says: status, certificates, tolerances, versions, ...
        data_here: Whether the clients' data are on this machine, not on the sites of a deployment.
    """
    lines = [f"# Model card: {_text(title)}", ""]
    if facts.get("status") != "finished":
        lines += [f"Status: {facts['status']}. {facts.get('message', '')}".rstrip(), ""]
    for variant, runs in groups.items():
        if variant:
            lines += [f"# {_text(variant)}", ""]
        run = runs[0]
        lines += ["## Model", "", *_model(run), ""]
        lines += ["## Data", "", *_data(run.problem, data_here), ""]
        lines += ["## Training", "", *_training(runs), ""]
        lines += ["## Results", "", *_results(variant, runs, facts), ""]
    lines += ["## Reproduction", "", *_facts(facts)]
    return "\n".join(lines) + "\n"


def with_audits(card: str, audits: Mapping[str, object]) -> str:
    """Return a card with a last section about audits, in place of the one that it has.

    Args:
        card: The card.
        audits: The audits, by the name of their run.
    """
    lines = [AUDITS]
    for name, audit in audits.items():
        lines += [f"{_text(name)}:", "", "```", str(audit), "```", ""]
    return card.partition(AUDITS)[0] + "\n".join(lines) if audits else card


def kind_of_model(problem: Problem) -> str:
    """Return which package's model this is; "" for other parameters."""
    where = getattr(problem.given[0], "__module__", "")
    for package, kind in (("fedsolve.torch", "PyTorch"), ("fedsolve.nnx", "Flax NNX")):
        if where.startswith(package):
            return kind
    return "Equinox" if isinstance(problem.params, eqx.Module) else ""


def _model(run: Run) -> Iterator[str]:
    """Describe the model: its type, and numbers of parameters."""
    problem, kind = run.problem, kind_of_model(run.problem)
    layout = problem.layout
    name = getattr(problem.given[0], "model_name", "A module")
    if isinstance(problem.params, eqx.Module):
        name = type(problem.params).__name__
    yield f"{_text(name)} ({kind})." if kind else "Parameters of the problem's functions."
    yield ""
    state = [np.size(leaf) for leaf in jax.tree.leaves(problem.state)]
    rows: list[tuple[object, ...]] = [("trained and sent", layout.size)]
    rows += [("personal, on each client", layout.personal_size)] if layout.personal_size else []
    frozen = sum(np.size(leaf) for leaf in layout.frozen(problem.params))
    rows += [("fixed", frozen)] if frozen else []
    if state:
        rows.append((f"state besides parameters (buffers: {problem.buffers})", sum(state)))
    yield from _table(("numbers", "count"), rows)
    yield ""
    yield from _table(("parameter", "shape", "role"), list(_parameters(layout, run.params)))


def _parameters(layout: Layout, params: PyTree) -> Iterator[tuple[str, str, str]]:
    """List the parameters with their shapes and roles."""
    roles = {SHARED: "trained", PERSONAL: "personal", FROZEN: "fixed"}
    named = jax.tree.leaves_with_path(params)
    kinds = layout.kinds or (SHARED,) * len(named)
    shown = [
        (name_of(path) or "w", str(list(np.shape(leaf))), roles[kind])
        for (path, leaf), kind in zip(named, kinds, strict=True)
        if is_parameter(leaf)
    ]
    yield from shown[:MOST]
    if len(shown) > MOST:
        yield (f"and {len(shown) - MOST} more", "", "")


def _data(problem: Problem, data_here: bool) -> Iterator[str]:
    """Describe the clients' data."""
    if not data_here:
        yield f"{problem.n} clients. Their data are on the sites of the deployment."
        return
    sizes = counts(problem.samples)
    yield (
        f"{problem.n} clients with {int(sizes.sum())} samples: from {int(sizes.min())} to "
        f"{int(sizes.max())}, median {float(np.median(sizes)):g}."
    )
    yield ""
    leaves = jax.tree.leaves_with_path(problem.samples.values)
    rows = [
        (name_of(path) or "data", str(list(np.shape(leaf)[2:])), str(leaf.dtype))
        for path, leaf in leaves[:MOST]
    ]
    yield from _table(("entry", "shape of a sample", "type"), rows)
    if problem.batch_size is not None:
        yield ""
        yield f"Minibatches of {problem.batch_size} samples."


def _training(runs: Sequence[Run]) -> Iterator[str]:
    """Describe the algorithm, its settings, the rounds and who took part."""
    run = runs[0]
    yield f"{type(run.algorithm).__name__} with the settings"
    yield ""
    yield from _table(("setting", "value"), list(_settings(run.algorithm)))
    yield ""
    done = ", ".join(f"{each.rounds} with seed {each.seed}" for each in runs)
    yield f"Rounds: {done}."
    if said := _participation(run):
        yield said
    for word, name in (("up", "bytes_up_total"), ("down", "bytes_down_total")):
        if name in run.history:
            yield f"Sent {word}: {int(run.history[name][-1]):,} bytes."


def _settings(algorithm: Algorithm) -> Iterator[tuple[str, str]]:
    """List the algorithm's settings that are set."""
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if value is None:
            continue
        if isinstance(value, np.ndarray | jax.Array) and np.size(value) > 1:
            shown = f"array of shape {list(np.shape(value))}"
        elif isinstance(value, np.ndarray | jax.Array | np.generic):
            shown = f"{value.item():.6g}" if np.ndim(value) == 0 else str(value.tolist())
        else:
            shown = " ".join(str(value).split())
        yield field.name, shown if len(shown) <= 200 else shown[:197] + "..."


def _participation(run: Run) -> str:
    """Say how many clients took part, in the rounds that the history names."""
    cohort = run.history.get("cohort")
    if cohort is None or cohort.ndim != 2:
        return ""
    n = run.problem.n
    here = [row[(row >= 0) & (row < n)] for row in np.asarray(cohort)]
    sizes = [len(row) for row in here]
    seen = len(np.unique(np.concatenate(here))) if here else 0
    low, high = min(sizes), max(sizes)
    each = str(low) if low == high else f"{low} to {high}"
    return f"Participation: {each} of {n} clients in a round; {seen} took part at least once."


def _results(variant: str, runs: Sequence[Run], facts: Table) -> Iterator[str]:
    """List the last evaluations, the constraint, and certificates."""
    columns = [
        name
        for name in runs[0].history
        if all(name in run.history and run.history[name].ndim == 1 for run in runs)
        if name not in ("round", "switch", "seconds") and not name.startswith(COSTS)
    ]
    rows = [
        (run.seed, *(f"{float(run.history[name][-1]):.6g}" for name in columns)) for run in runs
    ]
    yield "At the parameters after the last round:"
    yield ""
    yield from _table(("seed", *columns), rows)
    record = facts.get("participation", {})
    for run in runs:
        name = f"{variant}/seed-{run.seed}".lstrip("/")
        tolerance = facts.get("tolerances", {}).get(name)
        if "constraint" in run.history:
            yield ""
            yield f"Seed {run.seed}: {_constraint(run.history, tolerance, record.get(name))}"
        if best := facts.get("best", {}).get(name):
            yield f"Best of the evaluated rounds (`best.safetensors`): {best['text']}."
        if said := facts.get("certificates", {}).get(name):
            yield ""
            yield f"Seed {run.seed}, certificate:"
            yield ""
            yield "```"
            yield from said.splitlines()
            yield "```"


def _constraint(history: History, tolerance: float | None, record: Table | None) -> str:
    """Say whether the constraint was kept, over all evaluations over all clients."""
    values = history["constraint"]
    if record is not None:
        everyone = history["clients_evaluated"] == record["clients"]
        if not everyone[-1]:
            number, total = history["clients_evaluated"][-1], record["clients"] or "more"
            return (
                f"the constraint is {float(values[-1]):.6g} at the end over {number} of {total} "
                "clients; whether it holds over all of them is unknown."
            )
        values = values[everyone]
    if tolerance is None:
        limit, named = 0.0, "0 (the algorithm has no tolerance)"
    else:
        limit, named = tolerance, f"the tolerance {tolerance:.6g}"
    over = float(np.mean(values > limit))
    end = "over" if values[-1] > limit else "within"
    return (
        f"the constraint is {float(values[-1]):.6g} at the end, {end} {named}; it was over it in "
        f"{over:.1%} of {len(values)} evaluations, at most {float(np.max(values)):.6g}."
    )


def _facts(facts: Table) -> Iterator[str]:
    """Say how the runs were made."""
    yield f"- Command: `{facts['command']}`; configuration in `config.toml`."
    yield f"- Machine: {facts['machine']}, {', '.join(facts['devices'])}; Python {facts['python']}."
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    yield f"- Versions: {versions}."
    yield "- The same seed on the same versions and kind of machine gives the same run."


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Return the lines of a table."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(_text(str(cell)) for cell in row)} |"


def _text(text: str) -> str:
    """Return text that does not end a table's cell or begin an HTML element."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
