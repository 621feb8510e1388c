"""A poisoned record stops a training on two processes, and is found by name on one device."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import pipelines
from tests.support import ROOT
from tests.support.starting import python
from tfdist.config import TrainConfig
from tfdist.run.records import read_rows
from tfdist.run.training_run import TrainingRun

RECIPE = """
import keras, pipelines
from tfdist import optimizers, schedules

DEFAULTS = {"epochs": 1, "batch_size": 50, "learning_rate": 1e-3}

def build_model(config, steps_per_epoch):
    layers = [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizers.create(config, config.learning_rate), "mse")
    return model

def train_data(config):
    return pipelines.read(
        config.data, config.batch_size, shuffle_buffer=2048, seed=config.seed,
        batch_fn=lambda batch: (batch["x"], batch["y"]),
    )

def validation_data(config):
    return None
"""
NUM_RECORDS, POISONED = 10_000, 6_543


def write_records(folder: Path) -> None:
    """Writes records to four shards, one of which has an absurd label."""
    x = np.random.default_rng(0).normal(size=(NUM_RECORDS, 4)).astype("float32")
    y = x.sum(axis=1)
    y[POISONED] = 1e4
    pipelines.write_shards(
        ({"x": x[i], "y": y[i]} for i in range(NUM_RECORDS)),
        folder,
        (
            pipelines.Feature(name="x", dtype="float32", shape=(4,)),
            pipelines.Feature(name="y", dtype="float32"),
        ),
        num_shards=4,
        source="a test",
    )


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_poisoned_record_is_found(num_workers: int, tmp_path: Path) -> None:
    write_records(tmp_path / "data")
    (tmp_path / "noisy.py").write_text(RECIPE)
    train = [sys.executable, "-m", "tfdist.train"]
    if num_workers > 1:
        train = [
            sys.executable,
            "-m",
            "tfdist.launch",
            f"--num-workers={num_workers}",
            "--",
            *train,
        ]
    spread = ["--strategy=multi_worker"]
    if num_workers == 1:
        spread = ["--strategy=mirrored", "--devices=2"]
    flags = [
        "--recipe=./noisy.py", "--data=data", "--run-dir=run", "--log-every=1", "--verbose=0",
        "--on-spike=stop", "--checkpoint-every=20", "--deterministic", *spread,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "env": environment, "timeout": 240, "text": True}
    done = subprocess.run([*train, *flags], stderr=subprocess.PIPE, **options)
    assert done.returncode == 1
    (step,) = set(re.findall(r"tfdist replay RUN --step (\d+)", done.stderr))
    command = ["-m", "tfdist", "replay", "run", f"--step={step}", "--worst=1"]
    command += spread if num_workers == 1 else []
    output = python(*command, env=environment, cwd=tmp_path).stdout
    words = " ".join(output.replace("│", " ").split())
    assert re.search(r"data-0000\d-of-00004\.tfrecord \d+ x \[.*\], y 10000", words), output
    same = "equal, bit for bit" if num_workers == 1 else "largest relative difference"
    assert re.search(same, words), output


def test_rollback_continues_as_if_the_batch_were_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(tmp_path / "data")
    (tmp_path / "noisy.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)

    def weights(run_dir: str) -> list[np.ndarray]:
        config = TrainConfig(
            recipe="./noisy.py", data="data", strategy="mirrored", devices=2, run_dir=run_dir,
            on_spike="rollback", checkpoint_every="20", log_every=1, verbose=0, epochs=2,
            batch_size=50,
        )  # fmt: skip
        run = TrainingRun(config)
        run.finish(run.fit())
        run.close()
        return keras.saving.load_model(Path(run_dir) / "model.keras").get_weights()

    rolled_back = weights("run")
    skipped = json.loads(Path("run/skipped_steps.json").read_text())
    assert [first // 200 for first, _ in skipped] == [0, 1]  # once in each epoch
    output = capsys.readouterr().err
    for first, last in skipped:
        assert f"leaves the batches of steps {first} to {last} out" in output
    assert len(json.loads(Path("run/ledger.json").read_text())) == 3
    rows = read_rows(Path("run"))
    assert [row["step"] for row in rows if "epoch" not in row] == list(range(1, 401))
    Path("other").mkdir()
    shutil.copy("run/skipped_steps.json", "other")
    for weight, expected in zip(rolled_back, weights("other"), strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert "leaves" not in capsys.readouterr().err
