"""The README's script trains as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

DATA = """
import keras, numpy as np
x, y = np.zeros((100, 8, 8, 1)), np.zeros(100)
"""


def test_model_and_function_are_handed_over(tmp_path: Path) -> None:
    moved, function = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    by_function = moved.replace("model = build_model()", "").replace(
        "Trainer(model", "Trainer(build_model"
    )
    count = "print(trainer.model.optimizer.iterations.numpy(), trainer.strategy.num_replicas)"
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([DATA, function, moved, count, by_function, count])],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "20 2"  # two batches of 64 an epoch
    assert (tmp_path / "model.keras").exists()
