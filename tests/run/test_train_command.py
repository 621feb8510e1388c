"""The training command as a user runs it, in a separate process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import keras
import pytest
import yaml

from tests.support import ROOT, starting
from tfdist import train
from tfdist.cluster import membership
from tfdist.config import TrainConfig
from tfdist.errors import TERMINATED
from tfdist.loops import interrupts

#: As for a user: without the log level of TensorFlow that tests set.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
ENVIRONMENT.pop("TF_CPP_MIN_LOG_LEVEL", None)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tfdist.train", *arguments]


def run(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return starting.run(*command(*arguments), cwd=folder, env=ENVIRONMENT, code=None)


def test_invalid_flag_prints_two_lines(tmp_path: Path) -> None:
    done = run(["--batch-size", "0"], tmp_path)
    assert done.returncode == 1
    assert "--batch-size: expected greater than 0, got '0'" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_preemption_has_its_exit_code_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_: object) -> TrainConfig:
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler), "SIGTERM would end the process"
        handler(signal.SIGTERM, None)
        raise AssertionError

    monkeypatch.setattr("tfdist.run.flags.parse", parse)
    monkeypatch.setattr(interrupts, "_has_checkpoint", False)
    assert train.main([]) == TERMINATED


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--all-reduce", "nccl"], "strategy 'one_device' has no option 'all_reduce'"),
        (["--workers", "a:2222,b:2222", "--rank", "0"], "flags started 2 processes, but 'one_dev"),
    ],
    ids=["option of another strategy", "one of two workers"],
)
def test_strategy_that_does_not_fit_the_flags_trains_nothing(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(membership, "_in_use", None)
    assert train.main(flags) == 1
    assert f"error: {message}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_verbose_0_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folders = [f"--run-dir={tmp_path / 'run'}", f"--data-dir={tmp_path / 'data'}"]
    assert train.main(["--smoke", "--verbose=0", *folders]) == 0
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "run" / "model.keras").exists()


def test_smoke_leaves_a_run_folder(tmp_path: Path) -> None:
    done = run(["--smoke", "--strategy=mirrored", "--run-dir=run", "--data-dir=data"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # none of TensorFlow's startup messages
    for words in ("mirrored", "per-replica batch", "3/3 - ", "val_accuracy", "speed"):
        assert words in done.stdout
    folder = tmp_path / "run"
    files = (
        "config.yaml", "versions.json", "metrics.jsonl", "curves.png", "model.keras",
        "logger-tensorboard.json", "ledger.json",
    )  # fmt: skip
    assert {path.name for path in folder.iterdir()} == {*files, "tensorboard", "checkpoints"}
    config = TrainConfig(**yaml.safe_load((folder / "config.yaml").read_text()))
    assert config.smoke
    assert config.strategy == "mirrored"
    *_, line = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 3
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard" / "train").iterdir())
    architecture = zipfile.ZipFile(folder / "model.keras").read("config.json").decode()
    # A class of tfdist or of a recipe would have another module, or be registered (null).
    assert set(re.findall(r'"module": "?(\w+)', architecture)) == {"keras"}


def test_interrupt_saves_the_last_state(tmp_path: Path) -> None:
    line = command("--epochs=100000", "--run-dir=run", "--data-dir=data")
    with starting.piped(*line, cwd=tmp_path, env=ENVIRONMENT) as process:
        starting.wait_for_line(process, "Epoch 2/")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=starting.SECONDS)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "stopped" in output
    model = keras.saving.load_model(tmp_path / "run" / "model.keras")
    steps = int(model.optimizer.iterations)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert steps >= first["step"] > 0
