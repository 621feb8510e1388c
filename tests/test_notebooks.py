"""Properties of every notebook, and a test that its cells run.

The cells run here in this process in their smaller form, because importing TensorFlow takes most
of a small notebook's time. nbmake runs them as notebooks in kernels: `notebooks/conftest.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest

from tests.support import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


#: They mostly start subprocesses; `make check` runs the first in a kernel.
IN_KERNELS = ("06", "07")


def run_cells(path: Path) -> list[dict[str, Any]]:
    """Returns the cells that are run: nbclient skips those with the tag."""
    code = [one for one in json.loads(path.read_text())["cells"] if one["cell_type"] == "code"]
    return [one for one in code if "skip-execution" not in one["metadata"].get("tags", ())]


def code_of(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in run_cells(path)]


@each
def test_training_cells_build_their_model(path: Path) -> None:
    trains = [cell for cell in code_of(path) if ".fit(" in cell]
    assert trains
    # A repeated run would continue with an exhausted learning-rate schedule.
    assert all("tfdist.Trainer(" in cell or "build_model(" in cell for cell in trains)


@each
def test_tfdist_is_imported_before_keras(path: Path) -> None:
    """Or TensorFlow prints INFO messages."""
    assert code_of(path)[0].startswith("import tfdist")


@each
def test_outputs_are_stored_and_small(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", ()) for output in outputs), "make notebooks"
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert path.stat().st_size < 200_000


def test_index_page_lists_every_notebook() -> None:
    page = (ROOT / "notebooks/README.md").read_text()
    assert NOTEBOOKS
    assert all(f"]({path.name})" in page for path in NOTEBOOKS)


@each
def test_names_are_public(path: Path) -> None:
    api = (ROOT / "docs/api.md").read_text()
    modules = re.findall(
        r"^ *(?:from|import) ((?:tfdist|pipelines)[.\w]*)", "\n".join(code_of(path)), re.M
    )
    assert modules
    assert all(f":: {module}" in api for module in modules)


@pytest.mark.parametrize(
    "path",
    [path for path in NOTEBOOKS if not path.name.startswith(IN_KERNELS)],
    ids=lambda path: path.stem,
)
def test_cells_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    matplotlib.use("agg")
    names: dict[str, Any] = {"__name__": path.stem}
    for cell in run_cells(path):
        exec(compile("".join(cell["source"]), f"{path.name}, {cell['id']}", "exec"), names)
        names |= cell["metadata"].get("nbmake", {}).get("mock", {})  # as nbmake does
    plt.close("all")
