"""Programs of callbacks: every one of Keras, and those that users write, at their work.

What a callback finds out, or leaves in a file, it puts into the logs: they are compared.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import callbacks as kc
from keras import layers

from tests.programs.guides import dense
from tests.programs.program import program
from tests.programs.rows import normal, vectors

X, Y = normal(4), normal(1, seed=2)
VALIDATED = {"validation_data": (X[:6], Y[:6] + 1.0)}


class Tells(kc.Callback):
    """Puts numbers into the logs of an epoch.

    Args:
        find: given the model, what to tell by name.
    """

    def __init__(self, find: Callable[[keras.Model], dict[str, Any]]) -> None:
        super().__init__()
        self.find = find

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds what was found to the logs."""
        for name, value in self.find(self.model).items():
            logs[name] = float(np.sum(np.asarray(value)))


def _rate(model: keras.Model) -> dict[str, Any]:
    return {"rate": float(model.optimizer.learning_rate)}


def _file_of_weights(path: Path) -> Callable[[keras.Model], dict[str, Any]]:
    """What a checkpoint holds, each weight by its sum; -1 where none was written."""

    def read(_: keras.Model) -> dict[str, Any]:
        if not path.exists():
            return {"saved": -1.0}
        return {"saved": sum(np.sum(np.abs(w)) for w in _loaded(path))}

    return read


def _loaded(path: Path) -> list[np.ndarray]:
    if path.suffixes[-2:] != [".weights", ".h5"]:
        return keras.models.load_model(path).get_weights()
    model = dense()
    model.load_weights(path)
    return model.get_weights()


def _predicting(_: Path) -> Sequence[kc.Callback]:
    return [Tells(lambda model: {"predicted": model.predict(X[:3], verbose=0)})]


@program(vectors(), callbacks=_predicting, quick=True)
def predicts() -> keras.Model:
    """A callback that predicts three rows after each epoch."""
    return dense()


def _evaluating(_: Path) -> Sequence[kc.Callback]:
    def find(model: keras.Model) -> dict[str, Any]:
        return {"tested": model.evaluate(X[:3], Y[:3], verbose=0, return_dict=True)["mae"]}

    return [Tells(find)]


@program(vectors(), callbacks=_evaluating, quick=True)
def evaluates() -> keras.Model:
    """A callback that evaluates on rows of its own after each epoch."""
    return dense(metrics=["mae"])


def _calling(_: Path) -> Sequence[kc.Callback]:
    def find(model: keras.Model) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = keras.ops.sum(model(X[:3]))
        gradient = tape.gradient(loss, [w.value for w in model.trainable_variables])
        return {"called": loss, "gradient": sum(float(tf.norm(g)) for g in gradient)}

    return [Tells(find)]


@program(vectors(), callbacks=_calling)
def calls_and_differentiates() -> keras.Model:
    """A callback that calls the model and takes gradients of it."""
    return dense()


def _reading(_: Path) -> Sequence[kc.Callback]:
    def find(model: keras.Model) -> dict[str, Any]:
        kernel = model.layers[0].kernel
        return {
            "by_asarray": np.asarray(kernel),
            "by_numpy": kernel.numpy(),
            "by_get_weights": model.get_weights()[0],
            "by_layer": model.layers[1].get_weights()[0],
            "iterations": int(model.optimizer.iterations),
        }

    return [Tells(find)]


@program(vectors(), callbacks=_reading, quick=True)
def reads_weights() -> keras.Model:
    """A callback that reads weights in every way, and counts steps."""
    return dense()


def _writing(_: Path) -> Sequence[kc.Callback]:
    def soften(epoch: int, logs: Any) -> None:
        model = callback.model
        model.set_weights([0.5 * w for w in model.get_weights()])
        model.layers[1].bias.assign(model.layers[1].bias + 1.0)

    callback = kc.LambdaCallback(on_epoch_begin=soften)
    return [callback]


@program(vectors(), callbacks=_writing)
def sets_weights() -> keras.Model:
    """A callback that halves the weights and moves a bias before each epoch."""
    return dense()


class Warmup(kc.Callback):
    """A learning rate that grows from batch to batch."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate."""
        self.model.optimizer.learning_rate = 0.01 * (1 + int(self.model.optimizer.iterations))


@program(vectors(), callbacks=lambda _: [Warmup(), Tells(_rate)])
def changes_the_rate_by_batch() -> keras.Model:
    """A callback that sets the learning rate before each batch."""
    return dense(keras.optimizers.SGD(0.1))


class Thaws(kc.Callback):
    """Freezes a layer for the first epoch; thawed, it waits for the next `compile`."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Thaws or freezes."""
        self.model.layers[0].trainable = epoch > 0


@program(vectors(), callbacks=lambda _: [Thaws()])
def freezes() -> keras.Model:
    """A callback that freezes a layer before the first step, and thaws it for nothing."""
    return dense(keras.optimizers.SGD(0.1))


class Stops(kc.Callback):
    """Stops within the second epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops training after four steps."""
        if int(self.model.optimizer.iterations) == 4:
            self.model.stop_training = True


@program(vectors(), callbacks=lambda _: [Stops()], epochs=4)
def stops_within_an_epoch() -> keras.Model:
    """A callback that stops the training within an epoch."""
    return dense()


def _schedule(epoch: int, rate: float) -> float:
    return rate * 0.5 if epoch else rate


@program(vectors(), callbacks=lambda _: [kc.LearningRateScheduler(_schedule), Tells(_rate)])
def learning_rate_scheduler() -> keras.Model:
    """`LearningRateScheduler`."""
    return dense(keras.optimizers.SGD(0.2))


@program(
    vectors(), fit=VALIDATED, epochs=5,
    callbacks=lambda _: [
        kc.ReduceLROnPlateau(monitor="val_loss", factor=0.3, patience=1, min_delta=0.5)
    ],
)  # fmt: skip
def reduce_rate_on_plateau() -> keras.Model:
    """`ReduceLROnPlateau`."""
    return dense(keras.optimizers.SGD(0.1))


@program(
    vectors(), fit=VALIDATED, epochs=6, quick=True,
    callbacks=lambda _: [
        kc.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True)
    ],
)  # fmt: skip
def early_stopping() -> keras.Model:
    """`EarlyStopping` that restores the best weights."""
    return dense(keras.optimizers.SGD(0.5))


def _checkpoints(folder: Path) -> Sequence[kc.Callback]:
    best, last = folder / "best.keras", folder / "last.weights.h5"
    return [
        kc.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
        kc.ModelCheckpoint(last, save_weights_only=True, save_freq="epoch"),
        Tells(_file_of_weights(best)),
        Tells(lambda model: {"last": _file_of_weights(last)(model)["saved"]}),
    ]


@program(vectors(), fit=VALIDATED, epochs=3, callbacks=_checkpoints, quick=True)
def model_checkpoint() -> keras.Model:
    """`ModelCheckpoint` of the best model and of the last weights, read back by Keras."""
    return dense(keras.optimizers.SGD(0.4))


def _logger(folder: Path) -> Sequence[kc.Callback]:
    file = folder / "log.csv"

    def read(_: keras.Model) -> dict[str, Any]:
        with file.open() as lines:
            return {"written": sum(float(row["loss"]) for row in csv.DictReader(lines))}

    return [kc.CSVLogger(file), Tells(read)]


@program(vectors(), callbacks=_logger)
def csv_logger() -> keras.Model:
    """`CSVLogger`, its file read after each epoch."""
    return dense()


class Spoils(kc.Callback):
    """Makes a weight infinite after the first step, so that the next loss is no number."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Spoils the last bias."""
        if batch == 0:
            bias = self.model.layers[-1].bias
            bias.assign(np.full(bias.shape, np.nan))


@program(vectors(), callbacks=lambda _: [kc.TerminateOnNaN(), Spoils()])
def terminate_on_nan() -> keras.Model:
    """`TerminateOnNaN`, after a callback that spoils a weight."""
    return dense(keras.optimizers.SGD(0.1))


def _lambda(_: Path) -> Sequence[kc.Callback]:
    losses: list[float] = []
    return [
        kc.LambdaCallback(
            on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]),
            on_epoch_end=lambda epoch, logs: logs.update(so_far=float(np.sum(losses))),
        )
    ]


@program(vectors(), callbacks=_lambda)
def lambda_callback() -> keras.Model:
    """`LambdaCallback`, which adds up the losses of batches."""
    return dense()


@program(vectors(), fit=VALIDATED, callbacks=lambda _: [kc.SwapEMAWeights(swap_on_epoch=True)])
def swap_averaged_weights() -> keras.Model:
    """`SwapEMAWeights`: evaluated with the moving averages."""
    return dense(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7))


@program(vectors(), fit=VALIDATED, callbacks=lambda _: [kc.SwapEMAWeights()])
def swap_averaged_weights_to_validate() -> keras.Model:
    """`SwapEMAWeights` for the validations alone, as of `--ema`."""
    return dense(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7))


def _resume(runner: Any, arguments: dict[str, Any]) -> kc.History:
    """Trains one epoch, and then up to the third with a backup that is there."""
    runner.fit(**{**arguments, "epochs": 1})
    return runner.fit(**arguments)


@program(
    vectors(), epochs=3, train=_resume,
    callbacks=lambda folder: [kc.BackupAndRestore(folder, delete_checkpoint=False)],
)  # fmt: skip
def backup_and_restore() -> keras.Model:
    """`BackupAndRestore`: the second `fit` goes on after the first one's epoch."""
    return dense()


def _board(folder: Path) -> Sequence[kc.Callback]:
    def read(_: keras.Model) -> dict[str, Any]:
        files = sorted((folder / "train").glob("events*"))
        events = [e for f in files for e in tf.compat.v1.train.summary_iterator(str(f))]
        values = [v for e in events for v in e.summary.value if v.tag == "epoch_loss"]
        return {"told": sum(float(tf.make_ndarray(v.tensor)) for v in values)}

    return [kc.TensorBoard(folder, histogram_freq=1, write_graph=False), Tells(read)]


@program(vectors(), callbacks=_board)
def tensor_board() -> keras.Model:
    """`TensorBoard` with histograms of weights, its file of the epochs before read."""
    return dense()


class Collected(kc.RemoteMonitor):
    """Sends nothing, but takes the same way up to there."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes down what would have been sent."""
        super().on_epoch_end(epoch, logs)
        logs["sent_to"] = float(len(self.root))


@program(
    vectors(), callbacks=lambda _: [Collected(root="http://127.0.0.1:9", path="/never")], epochs=1
)
def remote_monitor() -> keras.Model:
    """`RemoteMonitor`, whose server is not there."""
    return dense()


def _container(_: Path) -> Sequence[kc.Callback]:
    return [kc.History(), kc.ProgbarLogger(), Tells(lambda model: {"params": model.count_params()})]


@program(vectors(), callbacks=_container, fit={"verbose": 2})
def history_and_progress() -> keras.Model:
    """`History` and `ProgbarLogger` given by hand, `verbose=2`."""
    return dense()


def _cloning(_: Path) -> Sequence[kc.Callback]:
    class Clones(kc.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            copied = keras.models.clone_model(self.model)
            copied.set_weights(self.model.get_weights())
            logs["cloned"] = float(np.sum(copied.predict(X, batch_size=4, verbose=0)))
            logs["layers"] = float(len(self.model.layers))

    return [Clones()]


@program(vectors(), callbacks=_cloning)
def clones_the_model() -> keras.Model:
    """A callback that clones the model and predicts by the clone."""
    return dense()


def _features(_: Path) -> Sequence[kc.Callback]:
    class Inner(kc.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            part = keras.Model(self.model.inputs, self.model.layers[-2].output)
            logs["features"] = float(np.sum(part.predict(X[:3], verbose=0)))

    return [Inner()]


@program(vectors(), callbacks=_features, quick=True)
def cuts_the_model() -> keras.Model:
    """A callback that predicts by a part of the model, for its features."""
    inputs = keras.Input((4,))
    x = layers.Dense(3, activation="relu")(inputs)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model
