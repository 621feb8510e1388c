"""Python blocks on pages are valid code, and name only what tfdist and pipelines have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipelines
import tfdist
from tests.docs.test_site import PAGES
from tests.support import ROOT

PACKAGES = {"tfdist": set(tfdist.__all__), "pipelines": set(pipelines.__all__)}
_BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.M | re.S)


def unknown_names(code: str) -> Iterator[str]:
    """Yields each name of tfdist or pipelines in a piece of code that does not exist."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in PACKAGES and not exists(node.value.id, node.attr):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            for alias in node.names:
                if not exists(str(node.module), alias.name):
                    yield f"{node.module}.{alias.name}"


def exists(module: str, name: str) -> bool:
    """Tells whether a module has a name: a public one, a submodule, or one that it defines."""
    place = ROOT / module.replace(".", "/")
    if (
        name in PACKAGES.get(module, ())
        or (place / name).is_dir()
        or (place / f"{name}.py").exists()
    ):
        return True
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    defined = rf"^(class|def) {name}\b|\"{name}\"|^{name}\b"
    return file.exists() and re.search(defined, file.read_text(), flags=re.M) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_are_valid(page: Path) -> None:
    for code in _BLOCK.findall(page.read_text()):
        assert not list(unknown_names(code))


def test_unknown_names_are_found() -> None:
    code = "import tfdist\ntfdist.Trainr()\nfrom tfdist.models import alexnett"
    assert set(unknown_names(code)) == {"tfdist.Trainr", "tfdist.models.alexnett"}
