"""A script that builds its models before the Trainer, under the launcher."""

from __future__ import annotations

import sys

import pytest

from tests.processes import prebuilt_model
from tests.support import ROOT, starting


def losses(output: str) -> list[str]:
    return [line.partition("losses ")[2] for line in output.splitlines() if "losses" in line]


@pytest.mark.processes
def test_models_that_were_built_first_train_over_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prebuilt_model.main("plain")
    plain = losses(capsys.readouterr().out)
    assert len(plain) == 2
    script = [sys.executable, "-m", "tests.processes.prebuilt_model", "multi_worker"]
    assert losses(starting.launch("--num-workers", "2", "--", *script, cwd=ROOT).stdout) == plain
