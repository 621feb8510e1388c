"""Observers of the calls of an epoch, and their cost."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.training import FIT, build, mirrored
from tfdist.checkpoint.settings import Checkpoints
from tfdist.checkpoint.store import Store
from tfdist.errors import ConfigurationError, NonFiniteError
from tfdist.loops.callbacks import may_change_model
from tfdist.strategies import mirrored_variables
from tfdist.strategies.variables import FullReplicaSync
from tfdist.trainer import Trainer


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


# ---- losses that are not finite ----


ROWS = 32
X = np.ones((ROWS, 2), "float32")
Y = np.ones((ROWS, 1), "float32")
#: The third of four batches contains NaN.
WITH_NAN = X.copy()
WITH_NAN[20] = np.nan


def build_linear() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="only")])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def fit(x: np.ndarray = WITH_NAN, **options: Any) -> Trainer:
    trainer = Trainer(build_linear, "mirrored", devices=2, steps_per_call=1, **options)
    trainer.fit(x, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return trainer


def test_warns_once_with_step_metrics_and_weight() -> None:
    with pytest.warns(UserWarning, match="became nan") as caught:
        fit()
    (message,) = [str(w.message) for w in caught if "became nan" in str(w.message)]
    assert "loss, mae became nan in step 3 of epoch 1." in message
    assert "first weight that is not finite is 'sequential" in message


def test_stop_raises_at_the_step() -> None:
    with pytest.raises(NonFiniteError, match=r"nan in step 3 of epoch 1\. .*clipnorm"):
        fit(on_nan="stop")


def test_checkpoint_saves_the_state_to_a_separate_folder(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"The state was saved to .*non-finite/epoch-0000"):
        fit(on_nan="checkpoint", checkpoints=Checkpoints(tmp_path, every=1))
    assert [place.step for place in Store(tmp_path).places()] == [2, 1]  # intact
    ((path, packed),) = [Store(tmp_path / "non-finite").load_newest(print)]
    assert path.endswith("step-000000003")
    assert np.isnan(packed.arrays["model/00000"]).any()


def test_invalid_on_nan_raises() -> None:
    with pytest.raises(ConfigurationError, match="set checkpoints too"):
        fit(on_nan="checkpoint")
    with pytest.raises(ConfigurationError, match="on_nan='never': expected one of warn, stop"):
        fit(on_nan="never")


def test_steps_that_the_loss_scale_skips_are_not_reported() -> None:
    """One batch overflows in float16: its loss is infinite, and its step is skipped."""

    def scaled() -> keras.Model:
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((2,)), layer])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        return model

    x = X.copy()
    x[20] = 6e4
    trainer = Trainer(
        scaled, "one_device", precision="mixed_float16", on_nan="stop", steps_per_call=1
    )
    history = trainer.fit(x, Y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
    assert not np.isfinite(history["loss"]).any()
    assert history["skipped_steps"] == [2]  # also the first step
    assert np.isfinite(trainer.model.get_weights()[0]).all()


def test_terminate_on_nan_takes_precedence() -> None:
    trainer = Trainer(build_linear, "one_device", on_nan="stop", steps_per_call=1)
    callbacks = [keras.callbacks.TerminateOnNaN()]
    history = trainer.fit(WITH_NAN, Y, batch_size=8, epochs=2, callbacks=callbacks, verbose=0)
    assert len(history.epoch) == 1
