"""`python -m tests.private_names`: finds uses of other packages' private names.

Part of `make lint`. Only `tfdist/upstream` may use them, and its README lists them, so that an
upgrade of Keras or TensorFlow has one place to check. A private module is one like `keras.src`; a
private attribute starts with an underscore and is not defined by a class of ours.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

_PACKAGES = ("tfdist", "pipelines", "recipes")
#: The only folder that may use private names.
ALLOWED = ROOT / "tfdist" / "upstream"
_PAGE = ALLOWED / "README.md"
_MODULES = ("keras.src", "tensorflow.python", "unittest")
#: Public despite the underscore, according to their documentation.
_PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace"}


def main() -> int:
    """Prints each violation, and returns 1 if there is one."""
    trees = {path: ast.parse(path.read_text()) for path in _paths()}
    page, found = _PAGE.read_text(), []
    for path, tree in trees.items():
        allowed = ALLOWED in path.parents
        for line, use, name in private(tree):
            if not allowed:
                found.append(
                    f"{path.relative_to(ROOT)}:{line}: {use}; move it into tfdist/upstream"
                )
            elif not re.search(rf"\b{re.escape(name)}\b", page):
                found.append(f"{path.relative_to(ROOT)}:{line}: {use}; {_PAGE.name} lacks {name}")
    print("\n".join(found) or "private names: used only in tfdist/upstream, and documented there")
    return 1 if found else 0


def _paths() -> list[Path]:
    return [path for package in _PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@functools.cache
def _ours() -> frozenset[str]:
    """Returns the private names that our files define."""
    return frozenset(name for path in _paths() for name in _defined(ast.parse(path.read_text())))


def private(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yields the line, expression and name of each use of another package's private name."""
    own, ours = _defined(tree), _ours()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for module in _modules(node):
                if any(f"{module}.".startswith(f"{private}.") for private in _MODULES):
                    yield node.lineno, f"imports {module}", module
        if not isinstance(node, (ast.Attribute, ast.Call, ast.Subscript)):
            continue
        known = ours if isinstance(node, ast.Attribute) and _of_self(node) else own
        for name in _named(node):
            if _is_private(name) and name not in known:
                yield node.lineno, f"uses {ast.unparse(node)}", str(name)


def _named(node: ast.Attribute | ast.Call | ast.Subscript) -> list[object]:
    """Returns the used attribute names, including `getattr(x, "_y")` and `vars(x)["_y"]`."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    values = node.args if isinstance(node, ast.Call) else [node.slice]
    return [value.value for value in values if isinstance(value, ast.Constant)]


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if node.module else []


def _defined(tree: ast.Module) -> set[str]:
    """Returns the private names that a file defines."""
    defined = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _of_self(node):
            defined.add(node.attr)
    return {name for name in defined if _is_private(name)}


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_private(name: object) -> bool:
    """Returns whether this is an identifier with a single leading underscore."""
    if not isinstance(name, str) or not name.isidentifier() or name in _PUBLIC:
        return False
    if name.startswith("_tfdist"):  # marks that we set on other packages' objects
        return False
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


if __name__ == "__main__":
    sys.exit(main())
