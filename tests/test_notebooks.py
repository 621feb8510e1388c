"""What a reader may rely on in every notebook; nbmake runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_cell_that_trains_makes_its_trainer(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    trains = [cell for cell in code if ".fit(" in cell]
    assert trains
    # One run again would go on with a schedule that is spent.
    assert all("tfdist.Trainer(" in cell for cell in trains)
