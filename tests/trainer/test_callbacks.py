"""Keras callbacks behave under the trainer as under Keras on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import callbacks as kc

from tests.support.training import (
    FIT,
    VALIDATED,
    X,
    Y,
    assert_close,
    assert_same_weights,
    build,
    fresh_pair,
    mirrored,
    steps,
)

_LOOPS = ("train", "test", "predict")
HOOKS = [f"on_{loop}_{when}" for loop in _LOOPS for when in ("begin", "end")]
HOOKS += [f"on_{loop}_batch_{when}" for loop in _LOOPS for when in ("begin", "end")]
HOOKS += ["on_epoch_begin", "on_epoch_end", "on_batch_begin", "on_batch_end", "set_params"]

Callbacks = Callable[[Path], kc.Callback | list[kc.Callback]]


class Recorder(kc.Callback):
    """Records every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def record(self, name: str, *arguments: Any, **logs: Any) -> None:
        self.calls.append((name, (*arguments, *logs.values())))


for _name in HOOKS:
    setattr(Recorder, _name, functools.partialmethod(Recorder.record, _name))


class At(kc.Callback):
    """Applies a function to the model after a given training batch, counted over all epochs."""

    def __init__(self, batch: int, do: Callable[[keras.Model], None]) -> None:
        super().__init__()
        self.left, self.do = batch, do

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            self.do(self.model)


class AddsToLogs(kc.Callback):
    """Adds the sum of an array that it computes from the model to the logs of each epoch."""

    def __init__(self, compute: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        self.compute = compute

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["computed"] = float(np.sum(self.compute(self.model)))


def predict_with_clone(model: keras.Model) -> np.ndarray:
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    return clone.predict(X, batch_size=4, verbose=0)


def predict_features(model: keras.Model) -> np.ndarray:
    return keras.Model(model.inputs, model.layers[-2].output).predict(X[:3], verbose=0)


class FreezesFirstEpoch(kc.Callback):
    """Freezes a layer in the first epoch, without compiling the model again."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[0].trainable = epoch > 0


def both(
    make: Callable[[], kc.Callback | list[kc.Callback]], *, build_model: Any = build, **fit: Any
) -> tuple:
    """Fits with the trainer and with plain Keras, and returns both models."""
    trainer, plain = (
        fresh_pair() if build_model is build else (mirrored(build_model), build_model())
    )
    for runner in (trainer, plain):
        made = make()
        runner.fit(**VALIDATED | fit, callbacks=made if isinstance(made, list) else [made])
    return trainer.model, plain


def test_hooks_get_the_arguments_of_keras() -> None:
    def calls(runner: Any) -> list[tuple[str, tuple[Any, ...]]]:
        recorder = Recorder()
        options = {"verbose": 0, "callbacks": [recorder]}
        runner.fit(**VALIDATED | options)
        runner.evaluate(X, Y, batch_size=4, **options)
        runner.predict(X, batch_size=4, **options)
        return recorder.calls

    build_model = functools.partial(build, metrics=["mae"])
    found, wanted = calls(mirrored(build_model)), calls(build_model())
    assert [name for name, _ in found] == [name for name, _ in wanted]
    for (name, ours), (_, theirs) in zip(found, wanted, strict=True):
        assert_close(ours, theirs)
        if name in ("on_train_batch_end", "on_epoch_end", "on_test_end", "on_train_end"):
            assert {type(value) for value in ours[-1].values()} == {float}


TRAINING: dict[str, Callbacks] = {
    "EarlyStopping": lambda _: kc.EarlyStopping(patience=1, restore_best_weights=True),
    "ReduceLROnPlateau": lambda _: kc.ReduceLROnPlateau(factor=0.3, patience=1, min_delta=0.5),
    "LearningRateScheduler": lambda _: kc.LearningRateScheduler(lambda epoch, lr: lr / (1 + epoch)),
    "stop in a batch": lambda _: At(5, lambda model: setattr(model, "stop_training", True)),
    "Lambda": lambda _: kc.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.pop("val_loss")),
    "BackupAndRestore": lambda folder: kc.BackupAndRestore(folder / "backup"),
    "RemoteMonitor, History, ProgbarLogger": lambda _: [
        kc.RemoteMonitor("http://127.0.0.1:9", "/no-server"), kc.History(), kc.ProgbarLogger()
    ],
    "clone": lambda _: AddsToLogs(predict_with_clone),
    "part of the model": lambda _: AddsToLogs(predict_features),
    "freeze": lambda _: FreezesFirstEpoch(),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINING)
def test_callback_trains_as_in_keras(name: str, tmp_path: Path) -> None:
    found, wanted = both(lambda: TRAINING[name](tmp_path))
    assert_close(found.history.history, wanted.history.history)
    assert found.history.epoch == wanted.history.epoch
    assert_close(
        found.get_weights(), wanted.get_weights()
    )  # some callbacks set them at the end of training
    assert steps(found) == steps(wanted)


def test_early_stopping_restores_an_earlier_epoch() -> None:
    trainer, _ = fresh_pair()
    trainer.fit(**VALIDATED, callbacks=[kc.EarlyStopping(patience=1, restore_best_weights=True)])
    losses = trainer.model.history.history["val_loss"]
    assert min(losses) < losses[-1]
    assert_close(trainer.evaluate(X[:9], 1 - Y[:9], verbose=0), min(losses))


@pytest.mark.parametrize("swap_on_epoch", [True, False])
def test_averaged_weights_are_swapped_in(swap_on_epoch: bool) -> None:
    def averaging() -> keras.Model:
        return build(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.5))

    found, wanted = both(lambda: kc.SwapEMAWeights(swap_on_epoch), build_model=averaging)
    assert_close(found.history.history, wanted.history.history)
    assert_same_weights(found, wanted)


@pytest.mark.parametrize("bad_row", [0, 8])
def test_terminate_on_nan(bad_row: int) -> None:
    y = Y.copy()
    y[bad_row] = np.nan
    found, wanted = both(kc.TerminateOnNaN, y=y)
    assert steps(found) == steps(wanted) == 1 + bad_row // 7
    assert len(found.history.history["loss"]) == 1


def test_evaluation_and_prediction_can_be_stopped() -> None:
    class Stop(kc.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_evaluating = batch == 1

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_predicting = batch == 1

    trainer, plain = fresh_pair()
    options = {"batch_size": 4, "verbose": 0, "callbacks": [Stop()]}
    assert_close(trainer.evaluate(X, Y, **options), plain.evaluate(X, Y, **options))
    assert_close(trainer.predict(X, **options), plain.predict(X, **options))
    assert len(trainer.predict(X, **options)) == 8


def test_callback_list_is_accepted_as_callbacks() -> None:
    trainer, _ = fresh_pair()
    recorder = Recorder()
    listed = kc.CallbackList([recorder], add_history=True, model=trainer.model)
    history = trainer.fit(**FIT, epochs=2, callbacks=listed)
    assert len(history.history["loss"]) == 2
    assert [name for name, _ in recorder.calls].count("on_train_batch_end") == 6
