"""Which callbacks run on every worker and which on the chief, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import callbacks as kc

from tfdist.callbacks.curves import Curves
from tfdist.callbacks.progress import ProgressBar
from tfdist.callbacks.step_log import StepLog
from tfdist.loops.callbacks import create_callback_list, is_chief_only, may_change_model
from tfdist.upstream.features import existing

WRITE = {
    kc.BackupAndRestore,
    kc.CSVLogger,
    kc.ModelCheckpoint,
    kc.RemoteMonitor,
    kc.TensorBoard,
    Curves,
    StepLog,
    *existing(kc, "OrbaxCheckpoint"),
}
DECIDE = {
    kc.Callback,
    kc.EarlyStopping,
    kc.History,
    kc.LambdaCallback,
    kc.LearningRateScheduler,
    kc.ProgbarLogger,
    kc.ReduceLROnPlateau,
    kc.SwapEMAWeights,
    kc.TerminateOnNaN,
    ProgressBar,
}


def instance_of_subclass(cls: type[kc.Callback], **members: object) -> kc.Callback:
    """Returns an instance of a user-defined subclass that needs no arguments."""
    return type("Mine", (cls,), {"__init__": lambda self: None, **members})()


def test_every_keras_callback_has_a_role() -> None:
    available = {getattr(kc, name) for name in dir(kc) if isinstance(getattr(kc, name), type)}
    assert available - {kc.CallbackList} <= WRITE | DECIDE


@pytest.mark.parametrize("cls", sorted(WRITE, key=str))
def test_writers_run_on_the_chief(cls: type[kc.Callback]) -> None:
    assert is_chief_only(instance_of_subclass(cls))
    assert not is_chief_only(instance_of_subclass(cls, chief_only=False))


@pytest.mark.parametrize("cls", sorted(DECIDE, key=str))
def test_deciding_callbacks_run_on_every_worker(cls: type[kc.Callback]) -> None:
    assert not is_chief_only(instance_of_subclass(cls))
    assert is_chief_only(instance_of_subclass(cls, chief_only=True))


def test_writers_do_not_change_the_model(tmp_path: Path) -> None:
    path = tmp_path / "one.keras"
    for callback in (kc.ModelCheckpoint(path), kc.CSVLogger(path), Curves(path), StepLog(path)):
        assert not may_change_model(callback)
    assert may_change_model(kc.BackupAndRestore(path))
    assert may_change_model(instance_of_subclass(kc.ModelCheckpoint))
    assert may_change_model(instance_of_subclass(kc.Callback, chief_only=True))


def test_chief_only_of_an_instance() -> None:
    callback = keras.callbacks.LambdaCallback()
    callback.chief_only = True
    assert is_chief_only(callback)


@pytest.mark.parametrize(
    "module", ["wandb.integration.keras.callbacks", "mlflow.tensorflow.callback"]
)
def test_experiment_trackers_run_on_the_chief(module: str) -> None:
    tracker = type("Logger", (kc.Callback,), {"__module__": module})
    assert is_chief_only(tracker())
    assert is_chief_only(instance_of_subclass(tracker))


def test_tensorboard_hparams_callback_runs_on_the_chief() -> None:
    from tensorboard.plugins.hparams import api

    assert is_chief_only(instance_of_subclass(api.KerasCallback))


class Worker:
    """A strategy whose group gathers identical numbers from all ranks."""

    def __init__(self, rank: int, num_workers: int = 2) -> None:
        self.group, self.is_chief = self, rank == 0
        self._num_workers = num_workers

    def gather(self, numbers: list[float]) -> np.ndarray:
        return np.asarray([numbers] * self._num_workers)


class Writer(kc.Callback):
    chief_only = True


def create(callbacks: Any, worker: Worker, progress: Any = None) -> kc.CallbackList:
    model = keras.Model()
    return create_callback_list(callbacks, progress, worker, add_history=True, model=model)


def names(container: kc.CallbackList) -> list[str]:
    return [type(callback).__name__ for callback in container.callbacks]


def test_keeps_the_order_with_the_progress_bar_last() -> None:
    callbacks = [[kc.EarlyStopping()], Writer(), kc.TerminateOnNaN()]
    chief, other = (create(callbacks, Worker(rank), ProgressBar(None)) for rank in (0, 1))
    assert names(other) == ["EarlyStopping", "TerminateOnNaN", "ProgressBar", "History"]
    assert names(chief) == ["EarlyStopping", "Writer", *names(other)[1:]]


def test_one_worker_is_the_chief() -> None:
    assert names(create(Writer(), Worker(0, num_workers=1))) == ["Writer", "History"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_container_is_not_changed(num_workers: int) -> None:
    container = kc.CallbackList([Writer() if num_workers == 1 else kc.TerminateOnNaN()])
    assert create(container, Worker(0, num_workers), ProgressBar(None)) is container


@pytest.mark.parametrize("rank", [0, 1])
def test_variables_are_compared_if_the_chief_may_change_them(rank: int) -> None:
    reader = Writer()
    reader.only_reads = True
    assert type(create([reader], Worker(rank))) is kc.CallbackList
    assert type(create([reader, Writer()], Worker(rank))) is not kc.CallbackList
    assert type(create([Writer()], Worker(0, num_workers=1))) is kc.CallbackList


def test_other_workers_drop_the_chiefs_callbacks() -> None:
    model = keras.Model()
    container = kc.CallbackList([Writer(), kc.TerminateOnNaN()], model=model, epochs=3)
    other = create(container, Worker(1), ProgressBar(None))
    assert names(other) == ["TerminateOnNaN"]
    assert other.callbacks[0].params == {"epochs": 3}
    assert names(container) == ["Writer", "TerminateOnNaN"]
