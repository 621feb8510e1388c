"""The number of steps per call, and the batches of callbacks with `steps_per_execution`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks as kc

from tests.support.training import X, Y, build
from tfdist.callbacks.progress import ProgressBar
from tfdist.errors import ConfigurationError
from tfdist.loops import steps_per_call
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.observers import Throughput
from tfdist.loops.steps_per_call import (
    TARGET_SECONDS,
    StepsPerCall,
    StepsPerCallCache,
    wants_every_batch,
)
from tfdist.strategies.one_device import OneDevice
from tfdist.trainer import Trainer


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return build()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that only tests advance."""
    now = [0.0]
    monkeypatch.setattr(steps_per_call.time, "perf_counter", lambda: now[0])
    return now


def calls(
    pacing: StepsPerCall, clock: list[float], seconds_per_step: float, number: int
) -> list[int]:
    """Makes calls, and returns the number of steps of each."""
    step_counts = []
    for _ in range(number):
        step_counts.append(pacing.num_steps)
        pacing.begin_call()
        clock[0] += seconds_per_step * pacing.num_steps
        pacing.end_call(pacing.num_steps)
    return step_counts


def test_calls_grow_to_their_target_duration(model: keras.Model, clock: list[float]) -> None:
    fitting = int(TARGET_SECONDS / 0.001)
    found = calls(StepsPerCall("auto", model), clock, 0.001, 6)
    assert found[:2] == [1, 1]  # the first call compiles and is not measured
    assert found[2:4] == [8, 64]  # growth is limited, in case a step was fast by chance
    assert found[-1] == pytest.approx(fitting, abs=1)


def test_next_pass_starts_with_the_last_number_of_steps(
    model: keras.Model, clock: list[float]
) -> None:
    recorded: list[int] = []
    pacing = StepsPerCall("auto", model, note=recorded.append)
    calls(pacing, clock, 0.001, 4)
    pacing.end_pass()
    pacing = StepsPerCall("auto", model, known=recorded[-1])
    assert calls(pacing, clock, 0.002, 2) == [recorded[-1], int(TARGET_SECONDS / 0.002)]


def test_one_slow_step_per_call(model: keras.Model, clock: list[float]) -> None:
    assert calls(StepsPerCall("auto", model), clock, 10 * TARGET_SECONDS, 4) == [1] * 4


@pytest.mark.parametrize("number", [1, 5])
def test_fixed_number_of_steps_is_kept(number: int, model: keras.Model, clock: list[float]) -> None:
    assert calls(StepsPerCall(number, model), clock, 1e-3, 4) == [number] * 4


def test_steps_per_execution_is_kept(clock: list[float]) -> None:
    pacing = StepsPerCall("auto", build(steps_per_execution=3), every_batch=True)
    assert calls(pacing, clock, 1e-3, 3) == [3] * 3
    assert pacing.last_step(3, num_steps_made=1) == 5  # as Keras passes to callbacks


@pytest.mark.parametrize("number", [0, -1, "fast", 1.5])
def test_invalid_number_raises(number: Any, model: keras.Model) -> None:
    with pytest.raises(ConfigurationError, match="expected 'auto' or an integer of at least 1"):
        StepsPerCall(number, model)


class OnBatch(kc.Callback):
    """Needs training batches."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass


class OnCall(OnBatch):
    """Runs on training batches, but not necessarily on each one."""

    every_batch = False


class OnTestBatch(kc.Callback):
    """Needs validation batches."""

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        pass


class OnBatchDeprecated(kc.Callback):
    """Overrides the deprecated name of a training-batch hook."""

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        pass


CALLBACKS: dict[str, tuple[Callable[[Path], kc.Callback], bool, bool]] = {
    "custom": (lambda _: OnBatch(), True, False),
    "custom, per call": (lambda _: OnCall(), False, False),
    "custom, deprecated name": (lambda _: OnBatchDeprecated(), True, False),
    "custom, validation": (lambda _: OnTestBatch(), False, True),
    "lambda": (lambda _: kc.LambdaCallback(on_train_batch_end=print), True, False),
    "lambda per epoch": (lambda _: kc.LambdaCallback(on_epoch_end=print), False, False),
    "NaN": (lambda _: kc.TerminateOnNaN(), True, False),
    "history": (lambda _: kc.History(), False, False),
    "early stopping": (lambda _: kc.EarlyStopping(), False, False),
    "checkpoints": (lambda p: kc.ModelCheckpoint(p / "m.keras"), False, False),
    "checkpoints by step": (lambda p: kc.ModelCheckpoint(p / "m.keras", save_freq=3), True, False),
    "backups": (lambda p: kc.BackupAndRestore(p), False, False),
    "backups by step": (lambda p: kc.BackupAndRestore(p, save_freq=3), True, False),
    "TensorBoard": (lambda p: kc.TensorBoard(p), False, False),
    "TensorBoard by step": (lambda p: kc.TensorBoard(p, update_freq=5), True, True),
    "TensorBoard's profile": (lambda p: kc.TensorBoard(p, profile_batch=3), True, False),
    "progress": (lambda _: ProgressBar(Throughput()), False, False),
    "Keras's progress": (lambda _: kc.ProgbarLogger(), False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_that_need_every_batch(name: str, tmp_path: Path, model: keras.Model) -> None:
    make, in_training, in_tests = CALLBACKS[name]
    callback = make(tmp_path)
    callback.set_model(model)
    assert wants_every_batch(callback) == in_training
    assert wants_every_batch(callback, "test") == in_tests


def test_number_is_kept_for_the_same_data_only() -> None:
    cache, strategy = StepsPerCallCache(), OneDevice()
    dataset = tf.data.Dataset.from_tensor_slices(X).batch(2)
    cache.note("test", DataHandler(strategy, dataset), 7)
    cache.note("test", DataHandler(strategy, X, batch_size=2), 8)
    assert cache.known("test", DataHandler(strategy, dataset)) == 7
    assert cache.known("test", DataHandler(strategy, np.zeros_like(X), batch_size=2)) == 8
    assert not cache.known("predict", DataHandler(strategy, dataset))
    assert not cache.known("test", DataHandler(strategy, dataset.take(2)))
    assert not cache.known("test", DataHandler(strategy, X, batch_size=3))
    assert not cache.known("test", DataHandler(strategy, ((row[None],) for row in X)))


class Recorder(keras.callbacks.Callback):
    """Records the batches that begin and end, and the number of output rows."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        for loop in ("train", "test", "predict"):
            setattr(self, f"on_{loop}_batch_begin", self._begin)
            setattr(self, f"on_{loop}_batch_end", self._end)

    def _begin(self, batch: int, logs: Any = None) -> None:
        self.events.append(batch)

    def _end(self, batch: int, logs: Any = None) -> None:
        self.events.append((batch, len((logs or {}).get("outputs", ()))))


def called(model: Any, weights_of: keras.Model) -> list[Any]:
    """Runs all loops with indivisible steps, and returns the callback events and results."""
    recorder, x, y = Recorder(), X[:14], Y[:14]
    options: dict[str, Any] = {"batch_size": 2, "callbacks": [recorder], "verbose": 0}
    model.fit(x, y, epochs=3, steps_per_epoch=3, shuffle=False, **options)
    results = [*weights_of.get_weights(), model.evaluate(x, y, steps=3, **options)]
    results += [model.predict(x, **options), model.predict(x, steps=3, **options)]
    return [recorder.events, results]


def test_steps_and_batches_match_keras() -> None:
    plain = build(steps_per_execution=2)
    trainer = Trainer(lambda: build(steps_per_execution=2), "mirrored", devices=2)
    (keras_events, wanted), (events, found) = called(plain, plain), called(trainer, trainer.model)
    assert events == keras_events
    for one, another in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, another, 1e-5, 1e-6)
