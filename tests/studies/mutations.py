"""Small changes of Python code, each of which a test should find."""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
