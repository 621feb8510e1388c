from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tfdist.config import TrainConfig
from tfdist.run import reports


class FakeTrainer:
    def __init__(self, num_replicas: int, facts: dict[str, str]) -> None:
        self.strategy = SimpleNamespace(num_replicas=num_replicas)
        self.describe = lambda: facts


STATS = SimpleNamespace(examples_per_second=1234.4, data_wait_share=0.125)


def test_start_shows_facts_and_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = FakeTrainer(3, {"strategy": "mirrored", "replicas": "3"})
    reports.start(trainer, TrainConfig(lr_rule="cosine"), 2, Path("runs/here"))
    shown = capsys.readouterr().out
    for words in ("mirrored", "21 or 22", "cosine, 0.001", "steps per epoch", "runs/here"):
        assert words in shown


def test_start_with_data_of_unknown_length(capsys: pytest.CaptureFixture[str]) -> None:
    reports.start(FakeTrainer(2, {}), TrainConfig(), None, Path("here"))
    assert "unknown until the first has ended" in capsys.readouterr().out


def test_summary_shows_last_and_best(capsys: pytest.CaptureFixture[str]) -> None:
    history = {
        "loss": [3.0, 2.0, 1.0],
        "val_loss": [0.9, 0.3, 0.4],
        "val_accuracy": [0.5, 0.8, 0.75],
    }
    reports.summary(history, 61.23, STATS, Path("here"), interrupted=False)
    shown = capsys.readouterr().out
    assert "last epoch (3)" in shown
    assert "val_loss 0.4000, val_accuracy 0.7500" in shown
    assert "lowest val_loss (epoch 2)" in shown
    assert "val_loss 0.3000, val_accuracy 0.8000" in shown
    assert "61.2 s" in shown
    assert "1234 rows/s, 12% waiting for data" in shown
    assert "stopped" not in shown


def test_summary_of_a_run_stopped_in_its_first_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    reports.summary({}, 1.0, STATS, Path("here"), interrupted=True)
    assert "model.keras holds the last state" in capsys.readouterr().out
