"""Which callbacks of Keras and other packages run on every worker, and which on the chief."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest
from keras import callbacks as kc

from tfdist.callbacks.curves import Curves
from tfdist.callbacks.progress import ProgressBar
from tfdist.callbacks.step_log import StepLog
from tfdist.loops.callbacks import is_chief_only, may_change_model

WRITE = {
    kc.BackupAndRestore,
    kc.CSVLogger,
    kc.ModelCheckpoint,
    kc.OrbaxCheckpoint,
    kc.RemoteMonitor,
    kc.TensorBoard,
    Curves,
    StepLog,
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
