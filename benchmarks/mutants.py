"""Mutation testing: change the source at one place, and see whether a test notices.

    python benchmarks/mutants.py storage --sample 20 --seed 0
    python benchmarks/mutants.py src/fedsolve/federation/replies.py --tests tests/federation

A mutant is one small change of the syntax: a comparison, an operator, a constant, a statement or a
keyword argument that is dropped, a call that returns its argument. It runs in a copy of the tree.
The tests of the folder run once to learn which test executes which line. A mutant then runs the
tests that execute its line, the quick ones first, until one fails. A process that has imported
JAX and the other packages, but not Fedsolve, forks once for each mutant.

Prints one line for each mutant, and the share that was killed for each folder. Mutants that no test
can kill are listed in `equivalent_mutants.txt`, with the reason, and are not run.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")
PRELOADED = (
    *("jax", "jax.numpy", "jax.experimental", "equinox", "optax", "jaxtyping", "beartype"),
    *("numpy", "scipy.optimize", "scipy.sparse", "sklearn.model_selection", "pandas"),
    *("matplotlib.pyplot", "safetensors.numpy", "typer", "rich.console", "psutil"),
    *("pytest", "hypothesis.extra.numpy", "cvxpy"),
)
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A piece of a file to replace: bytes `start` to `end`, in the statement on these lines."""

    path: str
    function: str
    lines: range
    start: int
    end: int
    before: str
    after: str

    @property
    def name(self) -> str:
        """What identifies the mutant although lines move."""
        return f"{self.path} {self.function}: {short(self.before)} -> {short(self.after)}"


def short(code: str) -> str:
    code = " ".join(code.split())
    return code if len(code) <= 120 else code[:100] + " ... " + code[-15:]


def replacements(node: ast.AST) -> Iterator[str]:
    """Yield what may stand in place of an expression or a statement."""

    def changed(**fields) -> str:
        return ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), **fields}))

    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                if type(op) in SWAPS:
                    yield changed(ops=[*ops[:i], SWAPS[type(op)](), *ops[i + 1 :]])
        case ast.BinOp(left=ast.Constant(value=str())) | ast.BinOp(right=ast.Constant(value=str())):
            pass  # a path, or text
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            yield changed(op=SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield ast.unparse(operand)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (ast.unparse(body), ast.unparse(orelse))
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield repr(value + 1)
        case ast.keyword(arg=str()):
            yield "**{}"
        case ast.Call(func=function, args=[_, *branches]) if len(branches) == 2:
            if ast.unparse(function).endswith(".where"):
                yield from map(ast.unparse, branches)
        case ast.Return(value=ast.Call(args=[ast.expr() as first, *_])) if not isinstance(
            first, ast.Starred
        ):
            yield f"return {ast.unparse(first)}"
        case ast.If(test=ast.Name() | ast.Call() | ast.Attribute()):
            yield f"not {ast.unparse(node.test)}"
        case ast.Raise(exc=ast.Name(id="NotImplementedError")):
            pass
        case ast.AugAssign() | ast.Raise() | ast.Expr(value=ast.Call()) | ast.Delete():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if any(
            isinstance(part, ast.Name) and part.id == name for part in ast.walk(value)
        ):
            yield "pass"


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a file. Annotations and messages of errors are left alone."""
    found, lengths = [], [0]
    for line in source.splitlines(keepends=True):
        lengths.append(lengths[-1] + len(line.encode()))

    def span(node: Any) -> tuple[int, int]:
        end = lengths[node.end_lineno - 1] + node.end_col_offset
        return lengths[node.lineno - 1] + node.col_offset, end

    def visit(node: ast.AST, function: str, lines: range) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
            first = min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])])
            lines = range(first, max(last or 0, node.lineno) + 1)
        place = node.test if isinstance(node, ast.If) else node
        for after in replacements(node):
            start, end = span(place)
            before = source.encode()[start:end].decode()
            if isinstance(place, ast.expr):
                after = f"({after})"
            found.append(Mutant(path, function, lines, start, end, before, after))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            if isinstance(node, ast.Raise) or (name == "args" and is_kind(node)):
                continue
            if function == "" and name == "value" and isinstance(value, ast.BinOp | ast.Subscript):
                continue  # an alias of types
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not is_guard(child):
                    visit(child, function, lines)

    visit(ast.parse(source), "", range(0))
    return found


def is_kind(node: ast.AST) -> bool:
    """Whether the arguments of a call name types: A | B."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "isinstance",
        "issubclass",
        "cast",
    )


def is_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING",)


class Selected:
    """A plugin of pytest: records who executes which line, or runs chosen tests in order."""

    def __init__(self, source: Path, order: dict[str, float] | None):
        self.source, self.order = f"{source}/", order
        self.tests: dict[str, dict] = {}
        self.failed: str | None = None
        self._current: dict = {"lines": set(), "starts": False}
        self.imported = self._current["lines"]
        if order is None:
            sys.settrace(self._trace)
            threading.settrace(self._trace)
            sys.addaudithook(self._audit)

    def _trace(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(self.source):
            return None
        name = frame.f_code.co_filename[len(self.source) :]
        self._current["lines"].add((name, frame.f_lineno))

        def line(frame, event, arg):
            self._current["lines"].add((name, frame.f_lineno))
            return line

        return line

    def _audit(self, event, arguments):
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self._current["starts"] = True

    def pytest_collection_modifyitems(self, items):
        if (order := self.order) is not None:
            items[:] = [item for item in items if item.nodeid in order]
            items.sort(key=lambda item: order[item.nodeid])

    def pytest_runtest_setup(self, item):
        if self.order is None:
            importlib.import_module("jax").clear_caches()  # so that this test traces anew
            self._current = {"lines": set(), "starts": False, "began": time.monotonic()}
            self.tests[item.nodeid] = self._current

    def pytest_runtest_logreport(self, report):
        if report.failed and self.failed is None:
            self.failed = report.nodeid
        if self.order is None and report.when == "teardown":
            own = self.tests[report.nodeid]
            own["seconds"] = time.monotonic() - own.pop("began")

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed = f"{report.nodeid} (import)"


def child(tree: Path, arguments: list[str], order: dict[str, float] | None) -> int:
    """Fork a process that runs pytest in the tree, and writes what its plugin learned."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()  # so that tests cannot signal the parent
        os.chdir(tree)
        log = os.open(tree / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.path[:0] = [str(tree / "src")]
        os.environ["PYTHONPATH"] = str(tree / "src")
        plugin = Selected(tree / "src" / "fedsolve", order)
        import pytest

        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]
        code = int(pytest.main([*options, *arguments], plugins=[plugin]))
        sys.settrace(None)
        known = {"imported": plugin.imported, "tests": plugin.tests, "failed": plugin.failed}
        (tree / "result.json").write_text(json.dumps(known, default=list))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end(pid: int) -> None:
    """End a process and all that it started."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def copy_tree(tree: Path) -> None:
    """Copy what git tracks, and new files that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


class Bench:
    """Copies of the tree, the lines that each test executes, and runs of mutants."""

    def __init__(self, folder: Path, tests: list[str], jobs: int = 1):
        first = folder / "0"
        copy_tree(first)
        os.chdir(first)
        os.environ["PYTHONPATH"] = str(first / "src")  # before JAX: the tests' own settings
        sys.path.insert(0, str(first))
        importlib.import_module("tests.support.environment")
        warnings.simplefilter("ignore")
        for name in PRELOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        sys.path.remove(str(first))
        began = time.monotonic()
        pid = child(first, tests, None)
        try:
            _, code = os.waitpid(pid, 0)
        except BaseException:
            end(pid)
            raise
        if code:
            raise SystemExit(f"The tests fail without a mutant:\n{(first / 'log.txt').read_text()}")
        result = json.loads((first / "result.json").read_text())
        self.imported = {tuple(line) for line in result["imported"]}
        self.seconds = {name: test["seconds"] for name, test in result["tests"].items()}
        self.starts = {name for name, test in result["tests"].items() if test["starts"]}
        self.executed = {
            name: {tuple(line) for line in test["lines"]} for name, test in result["tests"].items()
        }
        print(f"{len(self.seconds)} tests pass, {time.monotonic() - began:.0f} s", flush=True)
        self.trees = [first]
        for number in range(1, jobs):
            self.trees.append(shutil.copytree(first, folder / str(number)))

    def tests_of(self, mutant: Mutant) -> dict[str, float]:
        """Return the tests that may notice the mutant, with the place of each in the order."""
        path = mutant.path.removeprefix("src/fedsolve/")
        lines = {(path, line) for line in mutant.lines}
        own = {name for name, executed in self.executed.items() if executed & lines}
        if not own and self.imported & lines:
            own = set(self.seconds)
        return {
            name: seconds + 1000 * (name not in own)
            for name, seconds in self.seconds.items()
            if name in own | self.starts
        }

    def run(self, mutants: list[Mutant], patience: float) -> Iterator[tuple[Mutant, str, float]]:
        """Yield each mutant with the test that killed it ("" if none did), and the seconds."""
        waiting, free, running = list(enumerate(mutants, 1)), list(self.trees), []
        try:
            while waiting or running:
                while waiting and free:
                    number, mutant = waiting.pop(0)
                    if order := self.tests_of(mutant):
                        limit = patience * (30 + sum(self.seconds[name] for name in order))
                        running.append(Trial(mutant, free.pop(), number, order, limit))
                    else:
                        yield mutant, "", 0.0
                time.sleep(0.05)
                for trial in [trial for trial in running if trial.is_over()]:
                    running.remove(trial)
                    free.append(trial.tree)
                    yield trial.mutant, trial.verdict(), trial.seconds
        finally:
            for trial in running:
                end(trial.pid)


class Trial:
    """A mutant in one copy of the tree, and the process that runs its tests."""

    def __init__(
        self, mutant: Mutant, tree: Path, number: int, order: dict[str, float], limit: float
    ):
        self.mutant, self.tree, self.status, self.seconds = mutant, tree, -1, 0.0
        self._file, self._limit, self._began = tree / mutant.path, limit, time.monotonic()
        self._source, self._written = self._file.read_bytes(), self._file.stat().st_mtime
        before, after = self._source[: mutant.start], self._source[mutant.end :]
        self._file.write_bytes(before + mutant.after.encode() + after)
        self._dated(self._written + number)
        (tree / "result.json").unlink(missing_ok=True)
        modules = sorted({name.split("::")[0] for name in order})
        self.pid = child(tree, ["-x", *modules], order)

    def _dated(self, written: float) -> None:
        """Date the file so that no bytecode of other source is used."""
        os.utime(self._file, (written, written))

    def is_over(self) -> bool:
        """Whether the tests have ended, or their time is up; the tree is then as before."""
        self.seconds = time.monotonic() - self._began
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if done:
            self.status = status
        elif self.seconds < self._limit:
            return False
        else:
            end(self.pid)
            os.waitpid(self.pid, 0)
        self._file.write_bytes(self._source)
        self._dated(self._written)
        return True

    def verdict(self) -> str:
        """Return the test that failed, or what else ended the tests; "" if none failed."""
        result = self.tree / "result.json"
        failed = json.loads(result.read_text())["failed"] if result.exists() else None
        if failed or not self.status:
            return failed or ""
        return "time ran out" if self.status < 0 else f"exit status {self.status}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="+", help="folders of src/fedsolve, or files")
    parser.add_argument("--tests", nargs="+", help="tests to run (the folders of the same names)")
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--patience", type=float, default=4, help="times the expected seconds")
    parser.add_argument("--at-least", type=float, default=0, help="percent that must be killed")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--tiny", action="store_true", help="run two mutants")
    args = parser.parse_args()
    sample = 2 if args.tiny else args.sample

    files, tests = [], set(args.tests or [])
    for given in args.paths:
        path = next(p for p in (ROOT / given, ROOT / "src" / "fedsolve" / given) if p.exists())
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not args.tests:
            inside = path.relative_to(ROOT / "src" / "fedsolve")
            tests.add(f"tests/{inside.parts[0]}")
    mutants = []
    for file in files:
        mutants += mutants_of(str(file.relative_to(ROOT)), file.read_text())
    listed = [line.split(" # ")[0].strip() for line in EQUIVALENT.read_text().splitlines()]
    equivalent = [mutant for mutant in mutants if mutant.name in listed]
    mutants = [mutant for mutant in mutants if mutant.name not in listed]
    print(f"{len(mutants)} mutants, and {len(equivalent)} that no test can kill", flush=True)
    if sample is not None and sample < len(mutants):
        mutants = random.Random(args.seed).sample(mutants, sample)
    if args.list:
        print(*(f"{mutant.lines.start} {mutant.name}" for mutant in mutants), sep="\n")
        return
    killed, run = Counter(), Counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the children end, too
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        bench = Bench(Path(folder), sorted(tests), args.jobs)
        for mutant, killer, seconds in bench.run(mutants, args.patience):
            where = f"{mutant.path}:{mutant.lines.start}"
            print(f"{'killed' if killer else 'SURVIVED'} {seconds:.0f} s {where} {mutant.name}")
            print(f"    {killer}" if killer else "    no test noticed", flush=True)
            run[str(Path(mutant.path).parent)] += 1
            killed[str(Path(mutant.path).parent)] += bool(killer)
    for name in run:
        print(f"{name}: {killed[name]} of {run[name]} killed, {killed[name] / run[name]:.0%}")
    if 100 * sum(killed.values()) < args.at_least * sum(run.values()):
        raise SystemExit(f"fewer than {args.at_least:.0f} % killed")


if __name__ == "__main__":
    main()
