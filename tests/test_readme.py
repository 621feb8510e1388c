"""The README's example is `docs/example.py`, and it prints the output shown in the README."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support import ROOT
from tests.support.starting import run

README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "docs/example.py"


def test_readme_shows_the_example_script() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert shown == EXAMPLE.read_text()


def test_example_prints_the_metrics_in_the_readme(tmp_path: Path) -> None:
    done = run(sys.executable, str(EXAMPLE), "mirrored", cwd=tmp_path)
    shown = re.search(r"`(accuracy: [\d.]+ - loss: [\d.]+)`", README)
    assert shown
    assert done.stdout.splitlines()[-1].endswith(shown[1])
    assert (tmp_path / "model.keras").exists()
