"""Recipes train for two steps under several strategies."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from pathlib import Path

import keras
import pytest

from tests.recipes import small
from tests.support import starting
from tests.support.training import assert_close
from tfdist import train
from tfdist.config import TrainConfig
from tfdist.run import recipe
from tfdist.trainer import Trainer

#: Flags that make a recipe's data or model small.
SMALL = {"central_storage_big_embedding": ["--set=num_items=100", "--set=num_ratings=1000"]}

#: All but those that test_two_steps.py trains, which need flags to be small.
NAMES = [name for name in recipe.names() if name == "digits" or name not in small.SMALL]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def flags(name: str, folder: Path, data_dir: Path) -> list[str]:
    """Returns the flags for two steps of training and of validation."""
    folders = [f"--run-dir={folder / 'run'}", f"--data-dir={data_dir}"]
    short = ["--epochs=1", "--limit-steps=2", "--batch-size=8", "--verbose=0"]
    return [f"--recipe={name}", *short, *folders, *SMALL.get(name, [])]


def check(folder: Path) -> None:
    """Asserts that the run made two steps with finite metrics, and that Keras loads the model."""
    (line,) = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert found["step"] == 2
    assert all(v is not None and math.isfinite(v) for v in found.values())
    keras.saving.load_model(folder / "run" / "model.keras")


@pytest.mark.parametrize(
    "strategy", ["mirrored", pytest.param("one_device", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name: str, strategy: str, tmp_path: Path, data_dir: Path) -> None:
    devices = 2 if strategy == "mirrored" else 1
    on = [f"--strategy={strategy}", f"--devices={devices}"]
    assert train.main([*flags(name, tmp_path, data_dir), *on]) == 0
    check(tmp_path)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_two_steps_over_two_processes(name: str, tmp_path: Path, data_dir: Path) -> None:
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed: make horovod")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or "mpirun"
    command = [mpirun, "--oversubscribe", *root, "-np", "2", sys.executable, "-m", "tfdist.train"]
    environ = starting.ENVIRON | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    words = flags(name, tmp_path, data_dir)
    starting.run(*command, *words, "--strategy=horovod", cwd=tmp_path, env=environ)
    check(tmp_path)


def test_towers_by_hand_match_mirrored() -> None:
    from recipes import towers_by_hand

    config = TrainConfig(**{**towers_by_hand.DEFAULTS, "batch_size": 7})
    batches = list(towers_by_hand.train_data(config).take(3))

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        return towers_by_hand.build_model(config, 3)

    by_hand = build()
    by_hand.optimizer.build(by_hand.trainable_variables)
    step = towers_by_hand.tower_step(by_hand, ["CPU:0", "CPU:1"])
    for images, labels in batches:
        step(images, labels)
    trainer = Trainer(build, "mirrored", devices=2)
    for images, labels in batches:
        trainer.fit(images, labels, batch_size=7, verbose=0)
    assert_close(trainer.model.get_weights(), by_hand.get_weights())
