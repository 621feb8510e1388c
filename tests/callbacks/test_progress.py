"""The progress bar, on a terminal and in a log file."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tfdist.callbacks import progress
from tfdist.callbacks.progress import ProgressBar

STATS = SimpleNamespace(
    examples_per_second=7843.2, seconds_per_step=0.008, data_wait_share=0.12, gpu_use=None
)
ROWS = np.ones((20, 2), "float32")


def fit(verbose: str | int, epochs: int = 2) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    bar = ProgressBar(STATS)
    # Keras adds no bar to a `CallbackList`, and leaves its parameters as they are.
    callbacks = keras.callbacks.CallbackList([bar], add_history=True, model=model)
    callbacks.set_params({"verbose": verbose, "epochs": epochs, "steps": 4})
    model.fit(ROWS, ROWS[:, :1], 5, epochs, verbose=0, callbacks=callbacks)
    return model


def test_plain_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # imported by notebook tests
    fit("auto")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    assert len(lines) == 4
    assert "\r" not in lines[3]
    for part in ("4/4 - ", " - 8ms/step - 7.8k rows/s - waiting for data 12 % - loss: "):
        assert part in lines[3]


def test_redraws_one_line_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_can_redraw", lambda: True)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "50")
    fit(1, epochs=1)
    (line,) = capsys.readouterr().out.rstrip("\n").split("\n")
    *drawn, last = line.split("\r")[1:]
    assert [one.split()[0] for one in drawn] == ["1/4", "2/4", "3/4", "4/4"]
    assert {len(one) for one in drawn} == {49}  # truncated to fit the terminal
    assert last.startswith(f"4/4 {'━' * 20} ")
    assert "8ms/step - 7.8k rows/s - waiting for data 12 % - loss: " in last


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.123, "0.12"), (9.99, "10"), (999, "999"), (7843.2, "7.8k"), (2.5e6, "2.5M")],
)
def test_formats_numbers(number: float, text: str) -> None:
    assert progress.short(number) == text


def test_verbose_0_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    fit(0)
    assert capsys.readouterr().out == ""


def test_evaluate_and_predict_print_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    model = fit(0)
    for call in (model.evaluate, model.predict):
        callbacks = keras.callbacks.CallbackList([ProgressBar(STATS)], model=model)
        callbacks.set_params({"verbose": 2, "epochs": 1, "steps": 4})
        targets = {"y": ROWS[:, :1]} if call == model.evaluate else {}
        call(ROWS, batch_size=5, verbose=0, callbacks=callbacks, **targets)
    evaluated, predicted = capsys.readouterr().out.splitlines()
    assert evaluated.startswith("4/4 - ")
    assert "loss: " in evaluated
    assert "rows/s" not in evaluated
    assert predicted.startswith("4/4 - ")
