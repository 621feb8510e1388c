"""The README's example is `docs/example.py`, and it prints the output shown in the README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "docs/example.py"


def test_readme_shows_the_example_script() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert shown == EXAMPLE.read_text()


def test_example_prints_the_metrics_in_the_readme(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, "mirrored"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    promised = re.search(r"`(accuracy: [\d.]+ - loss: [\d.]+)`", README)
    assert promised
    assert done.stdout.splitlines()[-1].endswith(promised[1])
    assert (tmp_path / "model.keras").exists()
