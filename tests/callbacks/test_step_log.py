"""The log of metrics: one line of JSON for each logged step and each epoch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.training import building
from tfdist.callbacks.step_log import StepLog
from tfdist.errors import ConfigurationError
from tfdist.trainer import Trainer

X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
Y = X[:, :1] ** 2

build = building(
    lambda: [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)],
    lambda: keras.optimizers.SGD(0.01, global_clipnorm=1e-3),
)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_epoch_under_plain_keras(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    rows = np.ones((10, 2), "float32")
    log = StepLog(tmp_path / "metrics.jsonl")
    options = {"batch_size": 5, "validation_split": 0.2, "callbacks": [log], "verbose": 0}
    history = model.fit(rows, rows[:, :1], epochs=3, **options)
    lines = rows_of(tmp_path / "metrics.jsonl")
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert [line["val_mae"] for line in lines] == pytest.approx(history.history["val_mae"])
    assert 0 <= lines[0]["seconds"] <= lines[2]["seconds"]


def test_rows_of_steps_have_the_numbers_of_each_batch(tmp_path: Path) -> None:
    """Loss and gradient norm are those that Keras computes for the batch on one device."""
    trainer = Trainer(build, "mirrored", devices=2, log_every=1)
    log = StepLog(tmp_path / "metrics.jsonl", trainer.stats, every=1)
    model = build()
    model.set_weights(trainer.model.get_weights())
    batches = [slice(begin, begin + 4) for begin in range(0, 12, 4)]
    trainer.fit(X[:12], Y[:12], batch_size=4, shuffle=False, callbacks=[log], verbose=0)
    rows = [row for row in rows_of(tmp_path / "metrics.jsonl") if "epoch" not in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row, batch in zip(rows, batches, strict=True):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=X[batch], y=Y[batch], y_pred=model(X[batch]))
        gradients = tape.gradient(loss, model.trainable_variables)
        assert row["step_loss"] == pytest.approx(float(loss), rel=1e-5)
        norm = float(tf.linalg.global_norm(gradients))
        assert row["gradient_norm"] == pytest.approx(norm, rel=1e-5)
        assert row["gradient_norm"] > 1e-3  # before clipping
        assert row["learning_rate"] == pytest.approx(0.01)
        assert row["examples_per_second"] > 0
        assert row["peak_memory"] > 0
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def test_gradient_norm_of_accumulated_gradients_is_that_of_the_last_update(tmp_path: Path) -> None:
    def accumulating() -> keras.Model:
        model = build()
        model.compile(keras.optimizers.SGD(0.01, gradient_accumulation_steps=2), "mse")
        return model

    trainer = Trainer(accumulating, "mirrored", devices=2, log_every=1)
    model = build()
    model.set_weights(trainer.model.get_weights())
    log = StepLog(tmp_path / "metrics.jsonl", trainer.stats, every=1)
    trainer.fit(X[:12], Y[:12], batch_size=4, shuffle=False, callbacks=[log], verbose=0)
    rows = [row for row in rows_of(tmp_path / "metrics.jsonl") if "epoch" not in row]
    with tf.GradientTape() as tape:  # of two batches of the same size
        loss = tf.reduce_mean(tf.square(model(X[:8]) - Y[:8]))
    norm = float(tf.linalg.global_norm(tape.gradient(loss, model.trainable_variables)))
    assert [row["gradient_norm"] for row in rows] == pytest.approx([0, norm, norm], rel=1e-5)


def test_calls_end_at_logged_and_validated_steps(tmp_path: Path) -> None:
    """An evaluation within an epoch does not change what the epoch reports."""
    histories = []
    for options in ({}, {"log_every": 4, "validate_every": 6}):
        keras.utils.set_random_seed(0)
        trainer = Trainer(build, "mirrored", devices=2, steps_per_call=100, **options)
        log = StepLog(
            tmp_path / f"{len(histories)}", trainer.stats, every=options.get("log_every", "epoch")
        )
        histories.append(
            trainer.fit(
                X[:40], Y[:40], batch_size=4, epochs=2, validation_data=(X[40:], Y[40:]),
                callbacks=[log], verbose=0,
            )
        )  # fmt: skip
    rows = rows_of(tmp_path / "1")
    steps = [(row["step"], "val_loss" in row) for row in rows if "epoch" not in row]
    assert steps == [
        (4, False), (6, True), (8, False), (12, False), (12, True), (16, False), (18, True),
        (20, False),
    ]  # fmt: skip
    expected, logged = (history.history for history in histories)
    assert {name: logged[name] for name in expected} == expected
    assert rows[-1]["val_loss"] == expected["val_loss"][-1]


@pytest.mark.parametrize("options", [{"log_every": 0}, {"log_every": "x"}, {"validate_every": 1.5}])
def test_invalid_numbers_of_steps_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="expected a number of steps from 1"):
        Trainer(build, **options)


def with_model(log: StepLog) -> StepLog:
    log.set_model(build())
    log.on_train_begin()
    return log


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    stats = SimpleNamespace(examples_per_second=float("nan"), data_wait_share=0.25)
    log = with_model(StepLog(tmp_path / "a", stats))
    log.on_epoch_end(0, {"loss": float("inf"), "accuracy": np.float32(0.5)})
    (line,) = rows_of(tmp_path / "a")
    assert line.pop("seconds") >= 0
    assert line == {
        "epoch": 1, "step": 0, "examples_per_second": None, "data_wait_share": 0.25,
        "loss": None, "accuracy": 0.5,
    }  # fmt: skip


def test_restored_state_truncates_later_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    log = with_model(StepLog(path))
    log.on_epoch_end(0)
    state, text = log.get_state(), path.read_text()
    log.on_epoch_end(1)
    StepLog(path).set_state(state)
    assert path.read_text() == text


def test_lines_of_a_full_disk_are_written_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = with_model(StepLog(tmp_path / "missing" / "log"))
    log.on_epoch_end(0)
    log.on_epoch_end(1)
    assert capsys.readouterr().err.count("Training continues") == 1
    with pytest.raises(OSError, match="No such file"):
        log.on_train_end()
    (tmp_path / "missing").mkdir()
    log.on_train_end()
    assert [row["epoch"] for row in rows_of(tmp_path / "missing" / "log")] == [1, 2]
