"""A poisoned record stops a training on two processes, and is found by name on one device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pipelines
from tests.support import ROOT
from tests.support.starting import python

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
