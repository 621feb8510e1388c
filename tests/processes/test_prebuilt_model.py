"""A script that builds its models before the Trainer, in one process and under the launcher."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT

SCRIPT = [sys.executable, "-m", "tests.processes.prebuilt_model"]
LAUNCH = [sys.executable, "-m", "tfdist.launch", "--num-workers", "2", "--"]


def losses(*command: str) -> list[str]:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.partition("losses ")[2] for line in done.stdout.splitlines() if "losses" in line]


@pytest.mark.processes
def test_models_that_were_built_first_train_over_processes() -> None:
    plain = losses(*SCRIPT, "plain")
    assert len(plain) == 2
    assert losses(*LAUNCH, *SCRIPT, "multi_worker") == plain
