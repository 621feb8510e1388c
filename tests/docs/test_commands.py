"""Every command on a page is valid."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import Command, commands
from tests.support import ROOT

ALL = commands()
#: Pages whose commands need only this machine, and flags that make each command short.
PAGES = (
    "README.md", "docs/getting_started.md", "docs/clusters.md", "docs/images.md",
    "docs/kubernetes.md",
    "docs/large_models.md", "docs/resume.md", "docs/slurm.md", "docs/two_machines.md",
    "tfdist/checkpoint/README.md",
)  # fmt: skip
SMALL = {"tfdist.train": ["--smoke"], "tfdist.launch": ["--smoke"], "tfdist.bench": ["--smoke"]}
#: Flags that make a command short already.
WHOLE = {
    "--help", "--list-recipes", "--print-config", "--print-slurm", "--print-k8s", "--limit-steps",
    "--overfit-batches",
}  # fmt: skip
#: Commands that need something else, or the result of an earlier command.
LEFT_OUT = {
    "srun": "needs Slurm",
    "tfdist.runs": "runs of the reader's: tests/runs",
    "tfdist.init": "asks questions: tests/test_init.py",
    "my_script.py": "a script of the reader's",
    "train.py": "the README's example: tests/test_readme.py",
    "runs/x": "continues a run of the reader's: tests/checkpoint",
    "runs/a": "a run of the reader's: tests/run",
    "--via mpirun": "hosts that are not here",
    "run.yaml": "a file of the reader's: tests/run/test_flags.py",
    "photos": "photographs of the reader's: tests/pipelines, tests/recipes",
    "tfdist.tune": "fills the memory: tests/tune",
    "wandb": "needs an account",
}


def test_commands_are_found() -> None:
    assert len(ALL) > 80
    assert {one.page for one in ALL} >= {*PAGES, "docs/performance.md", "pipelines/README.md"}


def refused(lines: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.parsing"],
        input=json.dumps(lines),
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_flags_exist() -> None:
    assert not refused([(one.module, one.arguments) for one in ALL if one.module != "tfdist"])


def test_unknown_flag_is_detected() -> None:
    wrong = [("--stratgey", "mirrored"), ("--epochs", "-1"), ("--strategy", "miror")]
    assert len(refused([("tfdist.train", words) for words in wrong])) == len(wrong)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("shown", [one for one in ALL if one.page in PAGES], ids=str)
def test_command_runs(shown: Command, tmp_path: Path) -> None:
    for part, why in LEFT_OUT.items():
        if part in str(shown):
            pytest.skip(why)
    starter = shlex.split(shown.starter)
    if starter and not shutil.which(starter[0]):
        pytest.skip(f"{starter[0]} is not installed")
    if starter[:1] == ["mpirun"]:
        starter += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    whole = WHOLE & set(shown.arguments)
    small = [] if whole else SMALL.get(shown.module, [])
    done = subprocess.run(
        [*starter, sys.executable, "-m", shown.module, *shown.arguments, *small],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    # The doctor exits with 1 if a check fails, as it may here.
    allowed = (0, 1) if shown.module == "tfdist.doctor" else (0,)
    assert done.returncode in allowed, done.stdout[-2000:] + done.stderr[-2000:]
