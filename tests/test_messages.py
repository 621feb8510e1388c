"""Commands and functions that messages mention exist."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from collections.abc import Iterator

import pytest

import tfdist
from tests.support import ROOT
from tests.support.commands import require_horovod
from tfdist import errors
from tfdist.__main__ import COMMANDS

#: A command or function that a message tells the user to run or call.
_MENTIONED = re.compile(
    r"python -m ((?:tfdist|pipelines)[\w.]*\w)|\b(tfdist(?:\.\w+)+)\("
    r"|(?:[Rr]un|[Ss]ee|with) tfdist ([a-z]\w+)"
)


def messages() -> Iterator[str]:
    """Yields all strings in the code except docstrings."""
    for package in ("tfdist", "pipelines"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            described = (ast.Module, ast.ClassDef, ast.FunctionDef)
            owners = [node for node in ast.walk(tree) if isinstance(node, described)]
            documentation = {id(one.body[0].value) for one in owners if _begins_with_text(one)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and id(node) not in documentation:
                    yield str(node.value)


def _begins_with_text(owner: ast.Module | ast.ClassDef | ast.FunctionDef) -> bool:
    return bool(owner.body) and isinstance(owner.body[0], ast.Expr)


MENTIONED = {found for text in messages() for found in _MENTIONED.findall(text)}


@pytest.mark.parametrize("module", sorted(module for module, _, _ in MENTIONED if module))
def test_mentioned_command_exists(module: str) -> None:
    result = importlib.util.find_spec(module)
    assert result
    package = result.submodule_search_locations is not None
    assert not package or importlib.util.find_spec(f"{module}.__main__")


@pytest.mark.parametrize("name", sorted(name for _, _, name in MENTIONED if name))
def test_mentioned_name_is_a_command(name: str) -> None:
    assert name in COMMANDS


@pytest.mark.parametrize("path", sorted(path for _, path, _ in MENTIONED if path))
def test_mentioned_function_exists(path: str) -> None:
    first = path.split(".")[1]
    assert first in (*tfdist.__all__, *tfdist._MODULES)
    if first == "horovod":
        require_horovod()
    assert callable(pkgutil.resolve_name(path))


@pytest.mark.parametrize(
    ("error", "line", "summary"),
    [(OSError(), "OSError", "OSError"), (ValueError("\nwhat\nwhere"), "what", "ValueError: what")],
)
def test_first_line_of_an_error(error: Exception, line: str, summary: str) -> None:
    assert errors.first_line(error) == line
    assert errors.summary(error) == summary
