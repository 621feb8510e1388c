"""Observers of the calls of an epoch, and what they cost."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from tests.support.training import FIT, mirrored
from tfdist.loops.callbacks import may_change_model


class OnBatches(keras.callbacks.Callback):
    """Hears of every batch."""

    def __init__(self, only_reads: bool) -> None:
        super().__init__()
        self.only_reads = only_reads

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert may_change_model(self) is not self.only_reads


@pytest.mark.parametrize(
    ("callbacks", "times"),
    [([], 2), ([OnBatches(only_reads=True)], 2), ([OnBatches(only_reads=False)], 2 * 3)],
)
def test_copies_are_synchronized_only_after_possible_changes(
    callbacks: list[Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, calls = mirrored(), []
    monkeypatch.setattr(trainer.strategy, "sync_copies", calls.append)
    trainer.fit(**FIT, epochs=2, callbacks=callbacks)
    assert len(calls) == times
