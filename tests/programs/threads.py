"""Programs after public threads about distributed Keras: what was slow, wrong or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.program import program
from tests.programs.rows import integers, normal, vectors
from tests.support.case import compiled
from tests.support.data import Data

SGD = keras.optimizers.SGD


def network(units: int = 1, activation: str | None = None, kind: type = keras.Model) -> Any:
    """Returns a network of two layers of a class of models."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, activation="tanh")(inputs)
    return kind(inputs, layers.Dense(units, activation=activation)(hidden))


def _without_ignored(y: Any, p: Any) -> tuple[Any, Any]:
    kept = tf.not_equal(tf.reduce_max(y, axis=1), 0)
    return tf.boolean_mask(y, kept), tf.boolean_mask(p, kept)


def _masked_loss(y: Any, p: Any) -> Any:
    return tf.reduce_mean(keras.losses.categorical_crossentropy(*_without_ignored(y, p)))


def masked_accuracy(y: Any, p: Any) -> Any:
    return keras.metrics.categorical_accuracy(*_without_ignored(y, p))


@program(Data(normal(4), np.eye(4)[integers(4)][:, :3]))
def ignored_labels() -> keras.Model:
    """Loss and accuracy over the rows that a boolean mask keeps (horovod#2886)."""
    return compiled(network(3, "softmax"), SGD(0.1), _masked_loss, metrics=[masked_accuracy])


class Noisy(layers.Layer):
    """Adds random numbers of NumPy and a count: new constants for each function that is traced."""

    calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        return x + self.calls * np.random.normal(size=4)


def _randomly_weighted(y: Any, p: Any) -> Any:
    return tf.reduce_mean(tf.square(y - p), axis=-1) * np.random.uniform(0.5, 1.5)


@program(vectors(), only_fit=True, quick=True)
def numbers_at_trace_time() -> keras.Model:
    """A layer and a loss that draw from NumPy, or count, when they are traced (keras#14483)."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(Noisy()(inputs)))
    return compiled(model, SGD(0.1), _randomly_weighted)


class PerClass(keras.metrics.Metric):
    """Recall of each class, from counts in integers (keras#21054, tensorflow#37561)."""

    def __init__(self) -> None:
        super().__init__(name="recall")
        self.counts = self.add_weight(shape=(3, 3), initializer="zeros", dtype="int32")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        matrix = tf.math.confusion_matrix(tf.reshape(y, [-1]), tf.argmax(p, 1), 3)
        self.counts.assign(self.counts + matrix)

    def result(self) -> Any:
        counts = ops.cast(self.counts, "float64")
        return ops.diagonal(counts) / (ops.sum(counts, 1) + 1e-7)


class VectorLogs(keras.Model):
    """A step that logs a vector, and another value under the name of a metric (keras#15509)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.per_class, self.total = PerClass(), keras.metrics.Mean("total")

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.per_class]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, p))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.total.update_state(loss)
        self.per_class.update_state(y, p)
        return {"total": loss, "recall": self.per_class.result()}


class BatchLogs(keras.callbacks.Callback):
    """Adds the logs of every batch to those of the epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen += [np.ravel(logs[name]) for name in sorted(logs)]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["batches"] = np.concatenate(self.seen)


def _batch_logs(_: Path) -> Sequence[keras.callbacks.Callback]:
    return [BatchLogs()]


@program(Data(normal(4), integers(3)), callbacks=_batch_logs, only_fit=True, quick=True)
def logs_of_a_step() -> keras.Model:
    """The logs that callbacks get from a custom step of each batch, and of each epoch."""
    model = network(3, "softmax", VectorLogs)
    model.compile(SGD(0.1))
    return model


class Mixed(keras.Model):
    """MixUp within the step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seeds = keras.random.SeedGenerator(3)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        share = keras.random.beta((ops.shape(x)[0], 1), 2.0, 2.0, seed=self.seeds)
        order = keras.random.shuffle(ops.arange(ops.shape(x)[0]), seed=self.seeds)
        x = share * x + (1 - share) * ops.take(x, order, 0)
        y = share * y + (1 - share) * ops.take(y, order, 0)
        return super().train_step((x, y))


@program(vectors())
def mixed_in_the_step() -> keras.Model:
    """MixUp in `train_step`, which shuffles the rows of the batch."""
    return compiled(network(kind=Mixed), SGD(0.1))
