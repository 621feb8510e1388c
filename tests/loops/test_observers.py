"""Observers of the calls of an epoch, and their cost."""

from __future__ import annotations

import functools
import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.training import FIT, build, mirrored
from tfdist.loops.callbacks import may_change_model
from tfdist.strategies import mirrored_variables
from tfdist.strategies.variables import FullReplicaSync


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
    monkeypatch.setattr(trainer.strategy.variables, "sync_copies", calls.append)
    sync = FullReplicaSync(functools.partial(calls.append, None))
    monkeypatch.setattr(trainer.strategy.variables, "frequent_sync", lambda _: sync)
    trainer.fit(**FIT, epochs=2, callbacks=callbacks)
    assert len(calls) == times


class Halving(keras.callbacks.Callback):
    """Halves all weights after every batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.set_weights([weight / 2 for weight in self.model.get_weights()])


@pytest.mark.parametrize("one_by_one", [True, False])
def test_callback_assignments_reach_every_replica(
    one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not one_by_one:
        monkeypatch.setattr(mirrored_variables, "_FEW", 0)
    model = build()
    model.fit(**FIT, callbacks=[Halving()])
    trainer = mirrored()
    trainer.fit(**FIT, callbacks=[Halving()])
    for weight, plain in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(weight, plain, rtol=1e-5, atol=1e-6)


class Changing(keras.callbacks.Callback):
    """Changes the model after batches, in a way that `change` chooses; reads it after each."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = getattr(self, change)
        self.seen: list[Any] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.change(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((logs["loss"], *map(np.array, self.model.get_weights())))
        if batch > 0:
            self.change(batch)

    def learning_rate(self, batch: int) -> None:
        self.model.optimizer.learning_rate = 0.02 * (batch + 1)

    def variable(self, batch: int) -> None:
        kernel = self.model.trainable_variables[0].value
        kernel.assign_sub(0.1 * kernel)

    def compiled(self, batch: int) -> None:
        @tf.function
        def halve() -> None:
            for variable in self.model.trainable_variables:
                variable.assign(variable / 2)

        halve()

    def in_thread(self, batch: int) -> None:
        thread = threading.Thread(target=self.variable, args=[batch])
        thread.start()
        thread.join()

    def stop(self, batch: int) -> None:
        self.model.stop_training = batch > 1


@pytest.mark.parametrize("change", ["learning_rate", "variable", "compiled", "in_thread", "stop"])
def test_callbacks_see_and_change_the_same_numbers_as_in_keras(change: str) -> None:
    plain, ours = Changing(change), Changing(change)
    build().fit(**FIT, epochs=2, callbacks=[plain])
    mirrored().fit(**FIT, epochs=2, callbacks=[ours])
    assert len(ours.seen) == len(plain.seen)
    for own, others in zip(ours.seen, plain.seen, strict=True):
        for value, other in zip(own, others, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


def test_copies_get_only_what_callbacks_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, original = list[list[str]](), mirrored_variables.sync

    def sync(variables: Any, devices: Any) -> None:
        copied.append([variable.path.rpartition("/")[2] for variable in variables])
        original(variables, devices)

    trainer = mirrored()
    trainer.fit(**FIT)  # creates the copies
    monkeypatch.setattr(mirrored_variables, "sync", sync)
    trainer.fit(**FIT, callbacks=[OnBatches(only_reads=False)])
    assert copied[-1] == []
    trainer.fit(**FIT, callbacks=[Changing("learning_rate")])
    assert copied[-1] == ["learning_rate"]
