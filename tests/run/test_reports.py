"""Tables that a run prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

from tfdist import schedules
from tfdist.config import TrainConfig
from tfdist.run import reports

STATS = SimpleNamespace(examples_per_second=1234.4, data_wait_share=0.125, gpu_use=None)
BATCHES = tf.data.Dataset.range(100).batch(64)


def what_runs(
    config: TrainConfig, data: tf.data.Dataset, optimizer: Any = "sgd", unread: Sequence[str] = ()
) -> dict[str, str]:
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(num_replicas=3),
        describe=lambda weights: {"strategy": "mirrored"},
        model=SimpleNamespace(optimizer=keras.optimizers.get(optimizer)),
    )
    return reports.what_runs(trainer, config, data, unread)


def test_table_shows_what_runs_instead_of_the_options() -> None:
    config = TrainConfig(learning_rate=0.5, lr_rule="cosine")
    result = what_runs(config, BATCHES, unread=["learning_rate", "lr_rule"])
    assert result["optimizer"] == "SGD, learning rate 0.01"
    assert result["no effect"] == "learning_rate, lr_rule: the recipe does not read them"
    assert result["global batch"] == "64"
    assert result["per-replica batch"] == "21 or 22"
    assert result["steps per epoch"] == "2"
    assert result["strategy"] == "mirrored"


def test_table_shows_the_schedule_of_the_learning_rate() -> None:
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.3, 7))
    for used in (optimizer, keras.optimizers.LossScaleOptimizer(optimizer)):
        words = what_runs(TrainConfig(), BATCHES, used)["optimizer"]
        assert words.startswith("Adam, learning rate CosineDecay: initial_learning_rate 0.3, ")
        assert "decay_steps 7" in words
    config = TrainConfig(learning_rate=0.1, lr_scaling="sqrt", lr_reference_batch=16)
    rule = schedules.polynomial(0.2, 9, warmup_steps=2, start=0.05)
    result = what_runs(config, BATCHES, keras.optimizers.SGD(rule))
    assert "Warmup: then (PolynomialDecay: initial_learning_rate 0.2, " in result["optimizer"]
    assert result["learning rate"] == "constant, 0.2 (0.1 per 16 examples, sqrt)"


def test_batch_size_of_data_of_unknown_size() -> None:
    data = tf.data.Dataset.range(100).batch(64).filter(lambda row: True).map(lambda row: row)
    result = what_runs(TrainConfig(), data)
    assert result["global batch"] == "64 (the first batch)"
    assert result["steps per epoch"] == "unknown until the end of the first epoch"
    of_others = tf.data.Dataset.range(100).batch(48).map(lambda row: row[: tf.size(row)])
    result = what_runs(TrainConfig(), of_others)
    assert result["global batch"] == "48 (the first batch); batch_size is 64"
    assert result["per-replica batch"] == "16"


def test_inspecting_the_data_keeps_their_order() -> None:
    data = tf.data.Dataset.range(9).shuffle(9, seed=1).batch(3).map(lambda row: row[: tf.size(row)])
    again = tf.data.Dataset.range(9).shuffle(9, seed=1).batch(3)
    assert what_runs(TrainConfig(), data)["global batch"] == "64, if the data keep to it"
    seen = [[row.tolist() for row in rows.as_numpy_iterator()] for rows in (data, again)]
    assert seen[0] == seen[1]


def test_empty_data_show_the_configured_batch_size() -> None:
    data = tf.data.Dataset.range(9).filter(lambda row: False).batch(3).map(lambda row: row[:1])
    assert what_runs(TrainConfig(), data)["global batch"] == "64, if the data keep to it"


def test_summary_shows_last_and_best(capsys: pytest.CaptureFixture[str]) -> None:
    history = {
        "loss": [3.0, 2.0, 1.0],
        "val_loss": [0.9, 0.3, 0.4],
        "val_accuracy": [0.5, 0.8, 0.75],
    }
    reports.summary(history, 61.23, STATS, "here", stopped="", has_checkpoints=True)
    shown = capsys.readouterr().out
    assert "last epoch (3)" in shown
    assert "val_loss 0.4000, val_accuracy 0.7500" in shown
    assert "lowest val_loss (epoch 2)" in shown
    assert "val_loss 0.3000, val_accuracy 0.8000" in shown
    assert "61.2 s" in shown
    assert "1234 rows/s, 12% waiting for data" in shown
    assert "stopped" not in shown


def test_summary_of_a_run_stopped_in_its_first_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    reports.summary({}, 1.0, STATS, "here", stopped="by an interrupt", has_checkpoints=True)
    shown = capsys.readouterr().out
    assert re.search(r"latest weights .* model\.keras ", shown)
    assert "--run-dir here --resume auto" in shown
