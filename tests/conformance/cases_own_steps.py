"""Cases of models that override `train_step`, `test_step`, or both."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.support.case import case, compiled, mlp
from tests.support.data import points


class TwoLosses(keras.Sequential):
    """Trains its last layer, then all layers, with a loss of the updated weights."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.large = keras.metrics.Mean(name="large")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        norm = 0.0
        for weights in (self.layers[-1].trainable_weights, self.trainable_weights):
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred)
            gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.3)
            self.optimizer.learning_rate.assign(0.2 / (1.0 + norm))
            self.apply(gradients, weights)
        return self.measured(x, y, y_pred) | {"norm": norm, "raw_loss": loss}

    def apply(self, gradients: list, weights: list) -> None:
        """Applies gradients, and zeros for all other weights."""
        known = {id(v): g for v, g in zip(weights, gradients, strict=True)}
        every = self.trainable_weights
        pairs = [(known.get(id(v), ops.zeros_like(v)), v) for v in every]
        self.optimizer.apply_gradients(pairs)

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y_pred = self(x, training=False)
        return self.measured(x, y, y_pred) | {"raw_loss": self.compute_loss(x, y, y_pred)}

    def measured(self, x: Any, y: Any, y_pred: Any) -> dict[str, Any]:
        """Returns the metrics, one of which is updated once per batch."""
        error = ops.abs(y - y_pred)
        self.large.update_state(ops.mean(ops.cast(error > 0.5, "float32")))
        measured = self.compute_metrics(x, y, y_pred)
        return {name: value for name, value in measured.items() if name != "loss"}


@case(points())
def own_step() -> keras.Model:
    """`train_step` and `test_step` overridden, with two losses and manual clipping."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    hidden = layers.Dense(3, activation="tanh", kernel_regularizer="l2")
    model = TwoLosses([keras.Input((4,)), hidden, layers.Dense(1)])
    return compiled(model, optimizer, metrics=["mae", keras.metrics.RootMeanSquaredError()])


class OfPairs(keras.Sequential):
    """Compares the rows of a batch with each other in a custom `train_step`."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            similarity = ops.matmul(self(x, training=True), ops.transpose(y))
            rows = ops.arange(ops.shape(y)[0])
            losses = keras.losses.sparse_categorical_crossentropy(rows, similarity, True)
            loss = ops.mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"pairs": loss}


@case(points(16, outputs=2))
def own_step_of_pairs() -> keras.Model:
    """`train_step` overridden by one that compares rows with each other."""
    return compiled(OfPairs([keras.Input((4,)), *mlp(outputs=2).layers]))
