"""`fedsolve reproduce ppbc/decisive`: client selection at equal communication, on convex problems.

PPBC's paper claims that with a biased selection of clients PPBC converges to the right point, with
fewer communications. Its tables compare accuracies of networks after equally many rounds. This
study measures f − f* where f* is known, after equally many messages from clients, and after as many
bytes: a linear model on frozen features of MNIST and CIFAR-10, over ten clients.

- Gradients and losses are over all samples of a client, so the only noise is the selection.
- Every row has the step size with the least f at the end of the budget for seed 0, among powers of
  two times a first guess. The grid grows until the best value is not at its end. FedDyn's α and
  PPBC's p are from a grid. The other seeds run with the same numbers. A seed draws the partition,
  the server's samples and the selection.
- PPBC is measured where an epoch has ended, as its theorems are. Its epochs are Geom(p).
- f* is found by L-BFGS; the gradient there proves that it is right to `PROVED`.

Every row of every problem is a file of its own, so that the study can be stopped and resumed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsolve import plots
from fedsolve.algorithms import (
    F3AST,
    MIFA,
    PPBC,
    SCAFFOLD,
    Algorithm,
    FedAvg,
    FedDyn,
    FedVARP,
)
from fedsolve.errors import InvalidInput
from fedsolve.experiments.runner import Progress, Result
from fedsolve.experiments.tracking import Tracked
from fedsolve.participation import BANT, FOLB, GradientNorm, PowerOfChoice, Random, Top
from fedsolve.problem.problem import Problem
from fedsolve.problems import frozen_features
from fedsolve.runtimes.history import no_history
from fedsolve.solving.result import Run
from fedsolve.solving.stopping import Spent
from fedsolve.solving.sweep import sweep
from fedsolve.storage.atomic import write_atomically
from fedsolve.theory.reference import minimiser
from fedsolve.types import Table

Frame = Any  # a pandas DataFrame, whose types say less than its columns
PROVED = 1e-10  # accuracy of f*
MESSAGES = 2400
COUNT = 3  # clients that are selected, of ten
PENALTY = 1e-3
STRATEGIES: dict[str, Callable[[], object] | None] = {
    "GNS": GradientNorm,
    "random": None,
    "PoC": PowerOfChoice,
    "FOLB": FOLB,
    "BANT": BANT,
}
COUNTINGS = ("retained", "renormalised", "uniform")
SPLITS = {"distr-1": "iid", "distr-2": "two_groups", "distr-3": "uneven"}
STEPS = {"cifar10": 0.4, "mnist": 1.6}  # where the search for a step size begins
IMAGES = {"cifar10": 50_000, "mnist": 60_000}
KEY = ["dataset", "images", "features", "split", "local_steps"]  # a problem's columns
ALPHAS = (1.0, 3.0)
ENDS = (0.2, 0.5)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: an algorithm, and the grid from which its numbers are taken."""

    framework: str
    strategy: str
    algorithm: Algorithm
    step_size: float  # where the search for the best one begins
    grid: dict[str, tuple[float, ...]]  # of all other numbers
    rounds: int  # enough to use up the budget
    every: int  # rounds between evaluations

    @property
    def name(self) -> str:
        return f"{self.framework} + {self.strategy}"


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem of the study: data, features, partition, local steps."""

    dataset: str
    features: str
    split: str
    local_steps: int
    samples: int | None = 2000  # training images; None for all of them

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.images}-{self.features}-{self.split}-E{self.local_steps}"

    @property
    def images(self) -> int:
        """The number of training images."""
        return IMAGES[self.dataset] if self.samples is None else self.samples

    @property
    def about(self) -> Table:
        """What the rows of the table say of the problem."""
        return {name: getattr(self, name) for name in KEY}

    def problem(self, seed: int) -> Problem:
        """Return the problem of a seed."""
        size = 40 if self.features == "pca" else 24
        return frozen_features(
            self.dataset,
            self.features,
            SPLITS[self.split],
            size=size,
            samples=self.samples,
            penalty=PENALTY,
            seed=seed,
        )

    def rows(self, budget: int) -> list[Row]:
        """Return the rows, in the order in which they are run."""
        E, found = self.local_steps, []

        def add(
            framework: str,
            strategy: str,
            algorithm: Algorithm,
            grid: dict[str, tuple[float, ...]],
            per_round: int,
            every: int | None = None,
        ) -> None:
            rounds = int(budget / per_round) + 1
            every = max(rounds // 40, 1) if every is None else every
            begin = STEPS[self.dataset] / (4 if E > 1 else 1)
            found.append(Row(framework, strategy, algorithm, begin, grid, rounds, every))

        grid: dict[str, tuple[float, ...]] = {}
        add("FedAvg", "everyone", FedAvg(0.1, local_steps=E), grid, 10)
        add("F3AST", "its own", F3AST(0.1, participants=COUNT, local_steps=E), grid, COUNT)
        for strategy, weighting in STRATEGIES.items():
            asks = 10 if strategy == "BANT" else 0
            select: Table = {"selection": Top(COUNT), "local_steps": E}
            if weighting is None:
                select["selection"] = Random(COUNT)
            else:
                select["weighting"] = weighting()
            usual = {
                "FedAvg": FedAvg(0.1, **select),
                "SCAFFOLD": SCAFFOLD(0.1, **select),
                "MIFA": MIFA(0.1, **select),
                "FedVARP": FedVARP(0.1, **select),
            }
            for framework, algorithm in usual.items():
                add(framework, strategy, algorithm, grid, COUNT + asks)
            add(
                "FedDyn",
                strategy,
                FedDyn(0.1, **select),
                {"regularization": ALPHAS},
                COUNT + asks,
            )
            twice = {"select_epoch": select.pop("selection"), **select}
            for counting in COUNTINGS:
                algorithm = PPBC(0.1, counting=counting, **twice)
                ends = {"epoch_end": ENDS}
                add(f"PPBC, {counting}", strategy, algorithm, ends, COUNT, every=1)
        return found


SMALL = [
    Case(dataset, features, split, steps)
    for steps in (1, 5)
    for features in ("pca", "convolutions")
    for split in ("distr-3", "distr-2", "distr-1")
    for dataset in STEPS
]
CASES = [  # 2000 images of both, then all of CIFAR-10
    *SMALL,
    *(dataclasses.replace(case, samples=None) for case in SMALL if case.dataset == "cifar10"),
]
TAKES = "a row takes about 10 s, and some minutes with all images."
QUICK = [dataclasses.replace(SMALL[0], samples=1000)]


def known_minimum(problem: Problem) -> float:
    """Return f*; raise if its gradient does not prove that it is right to `PROVED`.

    f is λ-strongly convex, so f(y) − f* ≤ ‖∇f(y)‖²/(2λ).
    """
    value, point = minimiser(problem)
    with jax.enable_x64(True):
        placed = problem.on_device()

        def total(w: jax.Array) -> jax.Array:
            own = jax.vmap(lambda data: placed.objective(w.reshape(np.shape(problem.params)), data))
            return jnp.mean(own(placed.samples))

        slope = np.asarray(jax.jit(jax.grad(total))(jnp.asarray(point)))
    gap = float(slope @ slope) / (2 * PENALTY)
    if not gap <= PROVED:
        raise InvalidInput(f"f* is known to {gap:.1e} only, not to {PROVED:.0e}.")
    return value


def searched(loss: Callable[[float], float], step: float, most: int = 6) -> float:
    """Return the best of powers of two times `step`, from a grid that grows at its better end."""
    grid = [step * factor for factor in (0.25, 0.5, 1.0, 2.0)]
    for _ in range(most):
        best = min(grid, key=loss)
        if best == grid[0]:
            grid.insert(0, best / 2)
        elif best == grid[-1]:
            grid.append(best * 2)
        else:
            break
    return min(grid, key=loss)


def measured(run: Run, least: float, budgets: Sequence[int]) -> Iterator[Table]:
    """Measure f − f* and the accuracy where each budget of messages, or of bytes, is used up.

    Of PPBC only ends of epochs count.
    """
    history, size = run.history, run.problem.dimension * 8
    counts = history["epoch_end"].astype(bool) if "epoch_end" in history else np.array(True)
    for unit, column, one in (
        ("messages", "vectors_up_total", 1),
        ("bytes", "bytes_up_total", size),
    ):
        for budget in budgets:
            rows = np.flatnonzero((history[column] <= budget * one) & counts)
            gap, right, used = np.nan, np.nan, 0
            if len(rows):
                last = rows[-1]
                gap = float(history["objective"][last]) - least
                right = float(history["test_accuracy"][last])
                used = int(history[column][last])
            yield {"unit": unit, "budget": budget * one, "used": used} | {
                "gap": gap if np.isfinite(gap) else np.inf,
                "accuracy": right,
            }


def check_equal_budgets(data: Frame) -> None:
    """Raise if rows of a problem were not measured at the same numbers of messages and bytes."""
    names = ["framework", "strategy", "seed"]
    for key, part in data.groupby([*KEY, "unit"], sort=False):
        budgets = part.groupby(names)["budget"].apply(lambda own: tuple(sorted(own)))
        if budgets.nunique() > 1:
            one, other = budgets.drop_duplicates().index[:2]
            raise InvalidInput(
                f"Rows of {key[0]} have different budgets of {key[-1]}: {one[0]} + {one[1]}, and "
                f"{other[0]} + {other[1]}; only rows of one budget can be compared."
            )


@dataclasses.dataclass(frozen=True)
class Decisive:
    """The study, with the interface of a `Reproduction`."""

    name: str
    quick: bool
    seeds: int | None
    folder: Path
    by: dict[str, str]
    only: str = ""  # words that all names of rows to run have: "problem, framework + selection"

    @property
    def cases(self) -> list[Case]:
        """The problems."""
        return QUICK if self.quick else CASES

    @property
    def budget(self) -> int:
        """The messages that every row may use."""
        return 600 if self.quick else MESSAGES

    @property
    def all_seeds(self) -> list[int]:
        """The seeds."""
        return list(range(self.seeds or (1 if self.quick else 5)))

    @property
    def command(self) -> str:
        """The command that runs it."""
        words = ["fedsolve", "reproduce", self.name, *(["--quick"] if self.quick else [])]
        words += ["--seeds", str(self.seeds)] if self.seeds is not None else []
        words += ["--only", self.only] if self.only else []
        return shlex.join(words)

    @property
    def wanted(self) -> dict[Case, list[Row]]:
        """The rows of each problem that are to be run."""
        found: dict[Case, list[Row]] = {}
        words = self.only.split()
        for case in self.cases:
            names = {f"{case.name}, {row.name}": row for row in case.rows(self.budget)}
            kept = [row for name, row in names.items() if all(w in name for w in words)]
            found |= {case: kept} if kept else {}
        return found

    def check(self) -> None:
        """Raise if there is nothing to run."""
        if not self.wanted:
            example = f"{self.cases[0].name}, {self.cases[0].rows(self.budget)[-1].name}"
            raise InvalidInput(f"No row is named by {self.only!r}; a name is {example!r}.")

    @property
    def announcement(self) -> str:
        """What will be run."""
        rows = sum(len(rows) for rows in self.wanted.values())
        return (
            f"{self.name}: {len(self.wanted)} problems with {rows} rows in all and "
            f"{len(self.all_seeds)} seeds each; {TAKES}"
        )

    def run(
        self,
        progress: Progress | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Iterator[Result]:
        """Run what is missing, row by row; yield nothing unless interrupted."""
        for case, rows in self.wanted.items():
            missing = [row for row in rows if not self._file(case, row).is_file()]
            if not missing:
                continue
            problems = {seed: case.problem(seed) for seed in self.all_seeds}
            least = {seed: known_minimum(problem) for seed, problem in problems.items()}
            shown = Tracked(case.name, self.name, 0, case.name)
            for row in missing:
                if progress is not None:
                    progress(shown, rows.index(row), len(rows), no_history())
                if interrupted is not None and interrupted():
                    yield Result({}, self.folder, "interrupted", "The study was interrupted.")
                    return
                began = time.perf_counter()
                found = list(self._row(case, row, problems, least))
                seconds = round(time.perf_counter() - began, 1)
                text = json.dumps({"seconds": seconds, "rows": found}) + "\n"
                self._file(case, row).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._file(case, row), text.encode())

    def _file(self, case: Case, row: Row) -> Path:
        plain = row.name.replace(", ", "-").replace(" + ", "-").replace(" ", "-")
        return self.folder / "rows" / case.name / f"{plain}.json"

    def _row(
        self, case: Case, row: Row, problems: dict[int, Problem], least: dict[int, float]
    ) -> Iterator[Table]:
        """Choose the row's numbers with the first seed, and run all seeds with them."""
        first, *others = problems
        budgets = [self.budget // share for share in (8, 4, 2, 1)]

        def solved(given: tuple[int, Table]) -> Run:
            seed, numbers = given
            only: Table = {name: (value,) for name, value in numbers.items()}
            return sweep(  # of one run: it is stopped by itself, and no other number compiles anew
                problems[seed],
                row.algorithm,
                row.rounds,
                [seed],
                evaluate_every=row.every,
                precision="float64",
                stop=Spent(messages=self.budget),
                **only,
            ).runs[0]

        def last(run: Run) -> float:
            found = measured(run, least[first], budgets[-1:])
            return max(next(found)["gap"], PROVED)  # what is less is known to be no better

        tried: dict[float, Run] = {}

        def loss(step: float, own: Table) -> float:
            if step not in tried:
                tried[step] = solved((first, {"step_size": step} | own))
            return last(tried[step])

        best: tuple[float, Run, Table] | None = None
        for point in itertools.product(*row.grid.values()):
            own = dict(zip(row.grid, point, strict=True))
            tried.clear()
            step = searched(functools.partial(loss, own=own), row.step_size)
            if best is None or last(tried[step]) < best[0]:
                best = last(tried[step]), tried[step], {"step_size": step} | own
        assert best is not None
        _, found, chosen = best
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            rest = list(pool.map(solved, [(seed, chosen) for seed in others]))
        about = case.about | {"framework": row.framework, "strategy": row.strategy}
        about |= {"step_size": chosen["step_size"], "steps_tried": len(tried)}
        about |= {"alpha": chosen.get("regularization"), "p": chosen.get("epoch_end")}
        for seed, run in zip(problems, [found, *rest], strict=True):
            for each in measured(run, least[seed], budgets):
                yield about | {"seed": seed, "rounds": run.rounds} | each

    def table(self) -> Frame:
        """Return all measurements that there are."""
        import pandas as pd

        found = [
            json.loads(file.read_text(encoding="utf-8"))["rows"]
            for file in sorted((self.folder / "rows").glob("*/*.json"))
        ]
        if not found:
            raise InvalidInput(f"There are no results in {self.folder}.")
        data = pd.DataFrame([row for rows in found for row in rows])
        check_equal_budgets(data)
        order = {tuple(case.about.values()): place for place, case in enumerate(self.cases)}
        places = [order.get(key, -1) for key in zip(*(data[name] for name in KEY), strict=True)]
        return data.iloc[np.argsort(places, kind="stable")].reset_index(drop=True)

    def finish(self) -> Table:
        """Write `data.csv`, the pictures and `page.md`."""
        from matplotlib.style import context

        data = self.table()
        short = data.copy()
        for column in ("gap", "accuracy"):
            short[column] = [float(f"{value:.3g}") for value in short[column]]
        write_atomically(self.folder / "data.csv", short.to_csv(index=False).encode())
        with context(plots.STYLE):
            figure = drawn(data)
            for kind in ("png", "pdf"):
                figure.savefig(self.folder / f"decisive.{kind}", dpi=110)
        text = (
            f"# PPBC at equal messages\n\n`{self.command}`\n\n" + "\n\n".join(tables(data)) + "\n"
        )
        write_atomically(self.folder / "page.md", text.encode())
        made = {"name": self.name, "command": self.command, **self.by}
        write_atomically(self.folder / "made.json", (json.dumps(made) + "\n").encode())
        return made


ORDER = ["FedAvg", "SCAFFOLD", "FedDyn", "MIFA", "FedVARP", *(f"PPBC, {c}" for c in COUNTINGS)]
FLOOR = PROVED  # smaller differences say nothing


def tables(data: Frame) -> Iterator[str]:
    """Write a table for each problem: the geometric mean of f − f* at the end of the budget."""
    for key, part in data.groupby(KEY, sort=False):
        at_end = part[part["budget"] == part.groupby("unit")["budget"].transform("max")]
        lines = [f"## {_titled(key)}", ""]
        lines += [f"| f − f* | {' | '.join(STRATEGIES)} |", "|---" * (len(STRATEGIES) + 1) + "|"]
        for framework in ORDER:
            own = at_end[(at_end["framework"] == framework) & (at_end["unit"] == "messages")]
            if len(own) and framework in ORDER:
                cells = [_cell(own[own["strategy"] == strategy]) for strategy in STRATEGIES]
                lines.append(f"| {framework} | {' | '.join(cells)} |")
        for framework, strategy in (("F3AST", "its own"), ("FedAvg", "everyone")):
            own = at_end[
                (at_end["framework"] == framework)
                & (at_end["strategy"] == strategy)
                & (at_end["unit"] == "messages")
            ]
            lines.append(f"| {framework}, {strategy} | {_cell(own)} |" + " |" * 4)
        yield "\n".join(lines)


def _titled(key: Sequence[object]) -> str:
    """Name a problem by its values of `KEY`."""
    dataset, images, features, split, steps = key
    return f"{dataset}, {images} images, {features}, {split}, E = {steps}"


def _cell(rows: Frame) -> str:
    """Write the geometric mean over seeds, the factor of its spread, and the accuracy."""
    if not len(rows):
        return ""
    gaps = np.maximum(rows["gap"].to_numpy(float), FLOOR)
    if (gaps <= FLOOR).all():
        return f"< {FLOOR:.0e}, {100 * rows['accuracy'].mean():.1f} %"
    if not np.isfinite(gaps).all():
        return "diverges"
    logs = np.log(gaps)
    spread = f" ×÷{np.exp(logs.std()):.1f}" if len(gaps) > 1 else ""
    return f"{np.exp(logs.mean()):.1e}{spread}, {100 * rows['accuracy'].mean():.1f} %"


def drawn(data: Frame) -> Any:
    """Draw f − f* by messages: a panel for each problem, the best strategy of each framework."""
    from matplotlib.figure import Figure

    groups = list(data.groupby(KEY, sort=False))
    columns = min(len(groups), 3)
    rows = -(-len(groups) // columns)
    width = max(3.4 * columns, 7.5)  # the legend has four columns
    figure = Figure(figsize=(width, 2.6 * rows + 1.2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    shown = [("GNS", "-"), ("random", "--")]
    handles: Table = {}
    for axis, (key, part) in zip(axes, groups, strict=False):
        own = part[part["unit"] == "messages"]
        for number, framework in enumerate(ORDER):
            for strategy, line in shown:
                these = own[(own["framework"] == framework) & (own["strategy"] == strategy)]
                _line(axis, these, handles, f"{framework} + {strategy}", number, line)
        floor = own[(own["framework"] == "FedAvg") & (own["strategy"] == "everyone")]
        _line(axis, floor, handles, "FedAvg, everyone", 8, ":")
        axis.set(xscale="log", yscale="log", title=_titled(key))
        budgets = sorted(own["budget"].unique())
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.minorticks_off()
        axis.set_xlabel("Messages from clients")
    axes[0].set_ylabel("f − f*")
    for axis in axes[len(groups) :]:
        axis.set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=7)
    return figure


def _line(axis: Any, rows: Frame, handles: Table, label: str, number: int, line: str) -> None:
    if not len(rows):
        return
    middle = rows.groupby("budget")["gap"].apply(
        lambda gaps: np.exp(np.log(np.maximum(gaps, FLOOR)).mean())
    )
    color = plots.COLORS[number % len(plots.COLORS)]
    marker = "o" if number < len(plots.COLORS) else "s"
    drawn = axis.plot(middle.index, middle, line, color=color, marker=marker, ms=3, lw=1.1)
    handles.setdefault(label, drawn[0])
