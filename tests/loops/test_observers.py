"""Observers of the calls of an epoch, and their cost."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest

from tests.support.training import FIT, build, mirrored
from tfdist.loops.callbacks import may_change_model


class OnBatches(keras.callbacks.Callback):
    """A callback that runs after every batch."""

    def __init__(self, only_reads: bool) -> None:
        super().__init__()
        self.only_reads = only_reads

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert may_change_model(self) is not self.only_reads


@pytest.mark.parametrize(
    ("callbacks", "times"),
    [([], 2), ([OnBatches(only_reads=True)], 2), ([OnBatches(only_reads=False)], 2 * 3)],
)
def test_replicas_are_synchronized_only_after_possible_changes(
    callbacks: list[Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, calls = mirrored(), []
    monkeypatch.setattr(trainer.strategy, "sync_copies", calls.append)
    sync = functools.partial(calls.append, None)
    monkeypatch.setattr(trainer.strategy, "frequent_sync", lambda _: sync)
    trainer.fit(**FIT, epochs=2, callbacks=callbacks)
    assert len(calls) == times


class Halving(keras.callbacks.Callback):
    """Halves all weights after every batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.set_weights([weight / 2 for weight in self.model.get_weights()])


def test_callback_assignments_reach_every_replica() -> None:
    model = build()
    model.fit(**FIT, callbacks=[Halving()])
    trainer = mirrored()
    trainer.fit(**FIT, callbacks=[Halving()])
    for weight, plain in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(weight, plain, rtol=1e-5, atol=1e-6)
