"""Python blocks on pages name only what tfdist and pipelines have, and run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipelines
import tfdist
from tests.docs.code_blocks import blocks, num_to_run
from tests.docs.execution import run_page
from tests.docs.test_docstrings import ELSEWHERE
from tests.docs.test_site import PAGES
from tests.support import ROOT

PACKAGES = {"tfdist": set(tfdist.__all__), "pipelines": set(pipelines.__all__)}
BY_PAGE = {str(page.relative_to(ROOT)): blocks(page) for page in PAGES if blocks(page)}


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


def test_most_blocks_run() -> None:
    left_out = [block for found in BY_PAGE.values() for block in found if block.reason]
    assert len(BY_PAGE) >= 15
    assert len(left_out) <= 7


@pytest.mark.parametrize("page", BY_PAGE)
def test_names_in_blocks_exist(page: str) -> None:
    for block in BY_PAGE[page]:
        assert not list(unknown_names(block.code))


@pytest.mark.xdist_group("docstrings")
@pytest.mark.parametrize("page", [page for page in BY_PAGE if page not in ELSEWHERE])
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(ROOT / page) == num_to_run(ROOT / page)


def test_unknown_names_are_found() -> None:
    code = "import tfdist\ntfdist.Trainr()\nfrom tfdist.models import alexnett"
    assert set(unknown_names(code)) == {"tfdist.Trainr", "tfdist.models.alexnett"}
