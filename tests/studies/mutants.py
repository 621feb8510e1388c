"""Mutation testing: changes one place of the product code, and runs the tests that reach it.

    python -m tests.studies.mutants --measure          # which test runs which line: 15 minutes
    python -m tests.studies.mutants --measure --tests pipelines/reading    # the same of some tests
    python -m tests.studies.mutants --number 30        # 30 random mutants in each folder

A mutant that no test finds is equivalent to the original, or shows a missing test. The mutants are
drawn with a fixed seed. Each is written into a copy of the tree and tested in a process that is
forked from one that has already imported TensorFlow. The tests of `make test` that run the changed
statement start with the fastest, and stop at the first failure or time-out. Lines that only worker
processes run are known if the worker ended in order; the others are reported as `not run`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.studies.tests_by_line import TESTS, TestsByLine, measure
from tests.support import ROOT

FOLDERS = ("tfdist/step", "tfdist/strategies", "tfdist/groups", "pipelines/reading")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.studies.mutants")
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="files or folders to change")
    parser.add_argument("--number", type=int, default=30, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("/tmp/tfdist-mutants"), help="scratch")
    parser.add_argument("--measure", action="store_true", help="only measure what tests run")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="folders or files in tests/")
    options = parser.parse_args(arguments)
    (options.work / "references").mkdir(parents=True, exist_ok=True)
    if options.measure:
        return measure(options.work, options.tests)
    tree, survived = options.work / "tree", 0
    _copy(tree)
    plan = TestsByLine(options.work)
    _import_libraries()
    for folder in options.folders:
        files = [ROOT / folder] if folder.endswith(".py") else sorted((ROOT / folder).rglob("*.py"))
        results = [mutant for file in files for mutant in mutants_of(file)]
        random.Random(options.seed).shuffle(results)
        for mutant in results[: options.number]:
            tests, seconds = plan.reaching(mutant.file, *mutant.lines)
            verdict = _try(mutant, tests, 30 + 4 * seconds, tree) if tests else "not run"
            survived += verdict == "survived"
            place = f"{mutant.file.relative_to(ROOT)}:{mutant.lines[0]}"
            print(f"{verdict}\t{len(tests)} tests\t{place}\t{mutant.change}", flush=True)
    print(f"{survived} survived")
    return 0


def _copy(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    for file in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if (ROOT / file).exists():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, tree / file)


def _import_libraries() -> None:
    """Imports in this process what the forked processes need, without starting TensorFlow."""
    import hypothesis  # noqa: F401
    import keras  # noqa: F401
    import tensorflow  # noqa: F401


def _try(mutant: Mutant, tests: list[str], seconds: float, tree: Path) -> str:
    """Returns `killed`, `timed out` or `survived`."""
    file = tree / mutant.file.relative_to(ROOT)
    original = file.read_text()
    file.write_text(mutant.source)
    # Two changes of the same size within a second would be taken for the compiled file.
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
    try:
        child = os.fork()
        if child == 0:
            _run(tests, tree)
        deadline = time.monotonic() + seconds
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "timed out"
            time.sleep(0.1)
    finally:
        file.write_text(original)
    return "survived" if ended[1] == 0 else "killed"


def _run(tests: list[str], tree: Path) -> None:
    """Runs tests in the copied tree, in a process group of their own, and ends this process."""
    os.setsid()
    os.chdir(tree)
    log = os.open(tree.parent / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ["TFDIST_TEST_REFERENCES"] = str(tree.parent / "references")
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    os._exit(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider", "-m", ""]))


# ---- mutations ----


_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip
#: Nodes that no test can notice: annotations, messages and imports.
_SKIPPED = (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A changed file.

    Attributes:
        file: The product file.
        lines: First and last line of the changed statement.
        change: The changed expression before and after, for people.
        source: The text of the changed file.
    """

    file: Path
    lines: tuple[int, int]
    change: str
    source: str


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Yields every mutant of a file, one change each."""
    tree = ast.parse(file.read_text())
    for statement, parent, field, index in _places(tree, None):
        old = getattr(parent, field) if index is None else getattr(parent, field)[index]
        for new in _changes(old):
            _put(parent, field, index, new)
            # Positions of a new node are missing, but only its text is needed.
            source = ast.unparse(tree)
            _put(parent, field, index, old)
            change = f"{_short(old)} -> {_short(new)}"
            yield Mutant(file, (statement.lineno, _last_line(statement)), change, source)


def _places(
    node: ast.AST, statement: ast.stmt | None
) -> Iterator[tuple[ast.stmt, ast.AST, str, int | None]]:
    """Yields where a node may be replaced: its statement, its parent, the field and the index."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, _SKIPPED):
                continue
            within = child if isinstance(child, ast.stmt) else statement
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if within is not None:
                yield within, node, field, index if isinstance(value, list) else None
            yield from _places(child, within)


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yields replacements of one node."""
    new: Any = copy.copy(node)
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _COMPARISONS:
            new.ops = [_COMPARISONS[type(operator)]()]
            yield new
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield new
        case ast.BinOp() if type(node.op) in _OPERATORS:
            new.op = _OPERATORS[type(node.op)]()
            yield new
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.If() | ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), node.test)
            yield new
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _last_line(statement: ast.stmt) -> int:
    """Returns the last line of a statement, or of the header of a compound one."""
    if isinstance(statement, ast.If | ast.While):
        return statement.test.end_lineno or statement.lineno
    body = getattr(statement, "body", None)
    return statement.lineno if body else statement.end_lineno or statement.lineno


def _short(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0][:70]


if __name__ == "__main__":
    sys.exit(main())
