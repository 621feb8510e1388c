"""Unmodified Keras callbacks see from the trainer what they see from Keras on one device."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import callbacks as kc
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.training import (
    FIT,
    X,
    Y,
    assert_close,
    assert_same_weights,
    build,
    mirrored,
    steps,
)

VALIDATED = FIT | {"validation_data": (X[:9], 1 - Y[:9]), "epochs": 4}
HOOKS = [f"on_{loop}_{when}" for loop in ("train", "test", "predict") for when in ("begin", "end")]
HOOKS += [
    f"on_{loop}_batch_{when}" for loop in ("train", "test", "predict") for when in ("begin", "end")
]
HOOKS += ["on_epoch_begin", "on_epoch_end", "on_batch_begin", "on_batch_end", "set_params"]

Callbacks = Callable[[Path], kc.Callback]


class Recorder(kc.Callback):
    """Writes down every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def record(self, name: str, *arguments: Any, **logs: Any) -> None:
        self.calls.append((name, (*arguments, *logs.values())))


for _name in HOOKS:
    setattr(Recorder, _name, functools.partialmethod(Recorder.record, _name))


class At(kc.Callback):
    """Does something to the model at the end of a training batch, counted over all epochs."""

    def __init__(self, batch: int, do: Callable[[keras.Model], None]) -> None:
        super().__init__()
        self.left, self.do = batch, do

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            self.do(self.model)


def both(make: Callable[[], kc.Callback], *, build_model: Any = build, **fit: Any) -> tuple:
    """Fits with the trainer and with plain Keras; returns both models."""
    trainer, plain = mirrored(build_model), build_model()
    trainer.fit(**VALIDATED | fit, callbacks=[make()])
    plain.fit(**VALIDATED | fit, callbacks=[make()])
    return trainer.model, plain


def test_hooks_and_their_arguments_are_those_of_keras() -> None:
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
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINING)
def test_trains_as_with_keras(name: str, tmp_path: Path) -> None:
    found, wanted = both(lambda: TRAINING[name](tmp_path))
    assert_close(found.history.history, wanted.history.history)
    assert found.history.epoch == wanted.history.epoch
    assert_same_weights(found, wanted)
    assert steps(found) == steps(wanted)


def test_early_stopping_restores_an_earlier_epoch() -> None:
    model = mirrored()
    model.fit(**VALIDATED, callbacks=[kc.EarlyStopping(patience=1, restore_best_weights=True)])
    losses = model.model.history.history["val_loss"]
    assert min(losses) < losses[-1]
    assert_close(model.evaluate(X[:9], 1 - Y[:9], verbose=0), min(losses))


def test_averaged_weights_are_swapped_in() -> None:
    def averaging() -> keras.Model:
        return build(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.5))

    found, wanted = both(lambda: kc.SwapEMAWeights(swap_on_epoch=True), build_model=averaging)
    assert_close(found.history.history, wanted.history.history)
    assert_same_weights(found, wanted)


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_best_checkpoint(suffix: str, tmp_path: Path) -> None:
    def saver(folder: str) -> kc.Callback:
        return kc.ModelCheckpoint(
            tmp_path / folder / ("best" + suffix),
            save_best_only=True,
            save_weights_only=suffix != ".keras",
        )

    def saved(folder: str) -> keras.Model:
        path = tmp_path / folder / ("best" + suffix)
        if suffix == ".keras":
            return keras.saving.load_model(path)
        model = build()
        model.load_weights(path)
        return model

    mirrored().fit(**VALIDATED, callbacks=[saver("ours")])
    build().fit(**VALIDATED, callbacks=[saver("theirs")])
    assert_same_weights(saved("ours"), saved("theirs"))


def test_checkpoints_between_epochs(tmp_path: Path) -> None:
    def saver(folder: str) -> kc.Callback:
        path = tmp_path / folder / "{epoch}-{batch}.weights.h5"
        return kc.ModelCheckpoint(path, save_freq=2, save_weights_only=True)

    mirrored().fit(**FIT, epochs=2, callbacks=[saver("ours")])
    build().fit(**FIT, epochs=2, callbacks=[saver("theirs")])
    found, wanted = (sorted((tmp_path / folder).iterdir()) for folder in ("ours", "theirs"))
    assert [path.name for path in found] == [path.name for path in wanted]
    assert len(wanted) == 3
    for path, other in zip(found, wanted, strict=True):
        model, plain = build(), build()
        model.load_weights(path)
        plain.load_weights(other)
        assert_same_weights(model, plain)


@pytest.mark.parametrize("update_freq", ["epoch", 2])
def test_tensorboard(update_freq: str | int, tmp_path: Path) -> None:
    def scalars(runner: Any, folder: str) -> dict[str, Any]:
        board = kc.TensorBoard(tmp_path / folder, histogram_freq=1, update_freq=update_freq)
        runner.fit(**VALIDATED, callbacks=[board])
        found = {}
        for part in ("train", "validation"):
            events = EventAccumulator(str(tmp_path / folder / part)).Reload()
            for tag in events.Tags()["tensors"]:
                if tag.startswith(("epoch_loss", "batch_loss", "evaluation", "epoch_learning")):
                    found[f"{part} {tag}"] = [
                        (event.step, tf.make_ndarray(event.tensor_proto))
                        for event in events.Tensors(tag)
                    ]
        return found

    found, wanted = scalars(mirrored(), "ours"), scalars(build(), "theirs")
    assert "train epoch_loss" in wanted
    assert_close(found, wanted)


def test_csv_logger(tmp_path: Path) -> None:
    def rows(runner: Any, name: str) -> list[dict[str, float]]:
        runner.fit(**VALIDATED, callbacks=[kc.CSVLogger(tmp_path / name)])
        with (tmp_path / name).open() as file:
            return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]

    assert_close(rows(mirrored(), "ours"), rows(build(), "theirs"))


def test_lambda_sees_every_batch() -> None:
    seen: dict[str, list[int]] = {"train": [], "test": []}
    trainer = mirrored()
    trainer.fit(
        **FIT,
        epochs=2,
        callbacks=[
            kc.LambdaCallback(on_train_batch_end=lambda batch, logs: seen["train"].append(batch))
        ],
    )

    class Test(kc.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            seen["test"].append(batch)

    trainer.evaluate(X, Y, batch_size=2, verbose=0, callbacks=[Test()])
    assert seen == {"train": [0, 1, 2] * 2, "test": list(range(8))}


@pytest.mark.parametrize("bad_row", [0, 8])
def test_terminate_on_nan(bad_row: int) -> None:
    y = Y.copy()
    y[bad_row] = np.nan
    found, wanted = both(kc.TerminateOnNaN, y=y)
    assert steps(found) == steps(wanted) == 1 + bad_row // 7
    assert len(found.history.history["loss"]) == 1


def test_interrupted_training_goes_on(tmp_path: Path) -> None:
    def interrupt(_: keras.Model) -> None:
        raise KeyboardInterrupt

    def momentum() -> keras.Model:
        return build(keras.optimizers.SGD(0.1, momentum=0.9))

    with pytest.raises(KeyboardInterrupt):
        mirrored(momentum).fit(
            **VALIDATED, callbacks=[kc.BackupAndRestore(tmp_path / "backup"), At(7, interrupt)]
        )
    resumed, plain = mirrored(momentum), momentum()
    resumed.fit(**VALIDATED, callbacks=[kc.BackupAndRestore(tmp_path / "backup")])
    plain.fit(**VALIDATED)
    assert resumed.model.history.epoch == [2, 3]
    assert_close(resumed.model.history.history["loss"], plain.history.history["loss"][2:])
    assert_same_weights(resumed.model, plain)


def test_evaluation_and_prediction_can_be_stopped() -> None:
    class Stop(kc.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_evaluating = batch == 1

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_predicting = batch == 1

    trainer, plain = mirrored(), build()
    options = {"batch_size": 4, "verbose": 0, "callbacks": [Stop()]}
    assert_close(trainer.evaluate(X, Y, **options), plain.evaluate(X, Y, **options))
    assert_close(trainer.predict(X, **options), plain.predict(X, **options))
    assert len(trainer.predict(X, **options)) == 8


def test_a_list_of_callbacks_made_by_hand() -> None:
    trainer = mirrored()
    recorder = Recorder()
    listed = kc.CallbackList([recorder], add_history=True, model=trainer.model)
    history = trainer.fit(**FIT, epochs=2, callbacks=listed)
    assert len(history.history["loss"]) == 2
    assert [name for name, _ in recorder.calls].count("on_train_batch_end") == 6
