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
    assert len(lines) == 2
    assert lines[1].startswith("Epoch 2/2 - 4 steps - ")
    assert "ms/step" in lines[1]
    assert " - loss: " in lines[1]
    assert lines[1].endswith(" - 1000 images/s - data wait 3%")


def test_one_line_is_redrawn_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_can_redraw", lambda: True)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.0)
    fit(1, epochs=1)
    title, line = capsys.readouterr().out.split("\n")[:2]
    assert title == "Epoch 1/1"
    assert line.count("\r") == 5  # four steps and the end
    assert "4/4 " + "━" * 20 in line


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
    assert evaluated.startswith("4 steps - ")
    assert "loss: " in evaluated
    assert "images/s" not in evaluated
    assert predicted.startswith("4 steps - ")


def test_unknown_number_of_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_can_redraw", lambda: True)
    bar = ProgressBar(STATS)
    bar.set_params({"verbose": 1, "epochs": 1, "steps": None})
    bar.on_train_begin()
    bar.on_epoch_begin(0)
    bar.on_train_batch_end(2, {"loss": 0.5})
    bar.on_epoch_end(0, {"loss": 0.5})
    assert "3/? 0s" in capsys.readouterr().out
