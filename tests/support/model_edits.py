"""A callback that uses and modifies the model between epochs, in every way a user might."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.support.training import FIT, X, Y, assert_close
from tfdist.trainer import Trainer

#: Batches of 7, 7 and 1 rows in three epochs. The model is modified after the first two.
EPOCHS = FIT | {"epochs": 3, "validation_data": (X[:9], Y[:9])}


def build() -> keras.Model:
    """Returns a three-layer network whose optimizer has state, identical on every call."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(3, "tanh"), keras.layers.LayerNormalization()]
    model = keras.Sequential([keras.Input((X.shape[1],)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
    return model


class ModelEdits(keras.callbacks.Callback):
    """Predicts, saves, trains and changes the model; collects all results in `seen`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.seen = folder, []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        rate = self.model.optimizer.learning_rate
        self.seen.append(float(rate))
        self.model.optimizer.learning_rate = 0.9 * rate

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        model = self.model
        if epoch == 2:
            return
        self.seen += [model.predict(X[:3], verbose=0), model(X[:1]).numpy()]
        self.seen += [model.evaluate(X, Y, batch_size=7, verbose=0), model.predict_on_batch(X[:1])]
        self.seen += [np.asarray(variable) for variable in model.optimizer.variables]
        model.set_weights([0.9 * weight for weight in model.get_weights()])
        if epoch == 0:
            model.save(self.folder / "model.keras")
            # On other ranks, saving writes nothing: see `loops/model_methods.py`.
            path = self.folder / "model.keras"
            saved = keras.models.load_model(path) if tfdist.is_chief() else model
            self.seen += saved.get_weights()
            self.seen.append(model.train_on_batch(X[:5], Y[:5]))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(X[:5], training=True) - Y[:5]) ** 2)
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, weights), weights)
        else:
            history = model.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history
            self.seen.append(dict(history))


def fit_with_edits(fit: Any, model: keras.Model, folder: Path) -> list[Any]:
    """Trains with `fit` and the callback, and returns all results."""
    edits = ModelEdits(folder)
    history = dict(fit(**EPOCHS, callbacks=[edits]).history)
    return [*edits.seen, history, *(v.numpy() for v in model.variables + model.optimizer.variables)]


@functools.cache
def _wanted() -> list[Any]:
    """Returns the results of plain Keras."""
    plain = build()
    with tempfile.TemporaryDirectory() as folder:
        return fit_with_edits(plain.fit, plain, Path(folder))


def assert_matches_keras(trainer: Trainer, folder: Path) -> None:
    """Asserts that a trainer gives the same results as plain Keras under this callback."""
    assert_close(fit_with_edits(trainer.fit, trainer.model, folder), _wanted())
    trainer.model.export(folder / "exported", verbose=False)
    predicted = trainer.predict(X[:3], verbose=0)
    if tfdist.is_chief():
        exported = tf.saved_model.load(folder / "exported")
        assert_close(predicted, exported.serve(X[:3]).numpy())
