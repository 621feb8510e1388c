"""The log of metrics, one line of JSON for each epoch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tfdist.callbacks.metrics_log import MetricsLog


def test_one_line_per_epoch_under_plain_keras(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    rows = np.ones((10, 2), "float32")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    options = {"batch_size": 5, "validation_split": 0.2, "callbacks": [log], "verbose": 0}
    history = model.fit(rows, rows[:, :1], epochs=3, **options)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert [line["val_mae"] for line in lines] == pytest.approx(history.history["val_mae"])
    assert 0 <= lines[0]["seconds"] <= lines[2]["seconds"]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    stats = SimpleNamespace(examples_per_second=float("nan"), data_wait_share=0.25)
    log = MetricsLog(tmp_path / "a", stats)
    log.set_model(SimpleNamespace(optimizer=SimpleNamespace(iterations=7)))
    log.on_train_begin()
    log.on_epoch_end(0, {"loss": float("inf"), "accuracy": np.float32(0.5)})
    line = json.loads((tmp_path / "a").read_text())
    assert line.pop("seconds") >= 0
    assert line == {
        "epoch": 1, "step": 7, "examples_per_second": None, "data_wait_share": 0.25,
        "loss": None, "accuracy": 0.5,
    }  # fmt: skip


def test_restored_state_truncates_later_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("1\n22\n")
    state = MetricsLog(path).get_state()
    path.write_text("1\n22\n333\n")
    MetricsLog(path).set_state(state)
    assert path.read_text() == "1\n22\n"
