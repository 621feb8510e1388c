"""The site builds without warnings, links are valid, and the API page is complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipelines
import tfdist
from tests.support import ROOT
from tests.support.starting import python
from tfdist.strategies import STRATEGIES

FOLDERS = ("benchmarks", "docs", "notebooks", "pipelines", "tests", "tfdist")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and MyST make them."""
    result = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in result}


def broken(page: Path) -> Iterator[str]:
    for path, anchor in _LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            yield f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_are_valid(page: Path) -> None:
    assert not list(broken(page))


def test_api_page_has_every_public_module_and_name() -> None:
    page = (ROOT / "docs/api.md").read_text() + (ROOT / "docs/errors.md").read_text()
    described = set(re.findall(r":: (\S+)$", page, flags=re.M))
    wanted = {f"tfdist.{name}" for name in tfdist.__all__ if not name.startswith("_")}
    assert not wanted - described
    # `__all__` is documented with the module.
    assert pipelines.__name__ in described


def test_api_page_has_every_strategy() -> None:
    page = (ROOT / "docs/api.md").read_text()
    paths = {declared.path.replace(":", ".") for declared in STRATEGIES.values()}
    assert not [path for path in paths if f":: {path}\n" not in page]


@pytest.mark.parametrize("folder", ["tfdist/callbacks", "pipelines/maps"])
def test_api_page_has_every_callback_and_map(folder: str) -> None:
    page = (ROOT / "docs/api.md").read_text()
    modules = [path.stem for path in (ROOT / folder).glob("[a-z]*.py")]
    # Helpers that only draw.
    wanted = {f"{folder.replace('/', '.')}.{name}" for name in modules} - {
        "tfdist.callbacks.progress"
    }
    assert not {name for name in wanted if f":: {name}\n" not in page}


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    flags = ["-q", "-W", "--keep-going", "-d", str(tmp_path / "doctrees"), "-c", "docs"]
    python("-m", "sphinx", *flags, ".", str(tmp_path / "html"), cwd=ROOT)
    api = (tmp_path / "html/docs/api.html").read_text()
    assert 'id="tfdist.Trainer.fit"' in api
    assert 'id="pipelines.read"' in api
