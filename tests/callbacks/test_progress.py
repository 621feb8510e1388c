from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tfdist.callbacks import progress
from tfdist.callbacks.progress import ProgressBar

STATS = SimpleNamespace(examples_per_second=1000.4, data_wait_share=0.031)
ROWS = np.ones((20, 2), "float32")


def fit(verbose: str | int, epochs: int = 2) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    bar = ProgressBar(STATS)
    # To a list of callbacks Keras adds no bar of its own, and leaves its parameters as they are.
    callbacks = keras.callbacks.CallbackList([bar], add_history=True, model=model)
    callbacks.set_params({"verbose": verbose, "epochs": epochs, "steps": 4})
    model.fit(ROWS, ROWS[:, :1], 5, epochs, verbose=0, callbacks=callbacks)
    return model


def test_plain_lines_where_output_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    fit("auto")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    assert len(lines) == 4
    assert "\r" not in lines[3]
    for part in ("4/4", "ms/step", "loss: ", "images/s: 1000", "data_wait: 0.031"):
        assert part in lines[3]


def test_one_line_is_redrawn_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_can_redraw", lambda: True)
    fit(1, epochs=1)
    (line,) = capsys.readouterr().out.rstrip("\n").split("\n")
    assert "4/4" in line
    assert "images/s: 1000" in line


def test_silent(capsys: pytest.CaptureFixture[str]) -> None:
    fit(0)
    assert capsys.readouterr().out == ""


def test_evaluate_and_predict(capsys: pytest.CaptureFixture[str]) -> None:
    model = fit(0)
    for call in (model.evaluate, model.predict):
        callbacks = keras.callbacks.CallbackList([ProgressBar(STATS)], model=model)
        callbacks.set_params({"verbose": 2, "epochs": 1, "steps": 4})
        targets = {"y": ROWS[:, :1]} if call == model.evaluate else {}
        call(ROWS, batch_size=5, verbose=0, callbacks=callbacks, **targets)
    evaluated, predicted = capsys.readouterr().out.splitlines()
    assert evaluated.startswith("4/4 - ")
    assert "loss: " in evaluated
    assert "images/s" not in evaluated
    assert predicted.startswith("4/4 - ")
