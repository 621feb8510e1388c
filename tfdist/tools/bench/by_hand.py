"""Hand-written training loops for one model, as in TensorFlow's guides.

They are the baseline for `fit`: the whole loop is in the graph. Sources: "Writing a training loop
from scratch in TensorFlow" (keras.io) and "Custom training with tf.distribute.Strategy"
(tensorflow.org). The optimizer is built beforehand, so that the loop creates no variables. Each
function returns a function that runs a number of steps and returns their mean loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Loop = Callable[[Iterator[Any], int], float]
#: Takes gradients and returns their means over processes.
Exchange = Callable[[list[tf.Tensor]], list[tf.Tensor]]


def on_one_device(model: keras.Model, exchange: Exchange | None = None) -> Loop:
    """Returns the training loop for one device, or for one device in each of several processes.

    Args:
        model: A compiled model, whose optimizer is used.
        exchange: Averages gradients over processes, or None.
    """
    optimizer, weights = model.optimizer, model.trainable_variables
    optimizer.build(weights)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean_loss = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def train(iterator: Iterator[Any], num_steps: tf.Tensor) -> None:
        for _ in tf.range(num_steps):
            x, y = next(iterator)
            with tf.GradientTape() as tape:
                logits = model(x, training=True)
                loss = loss_of(y, logits)
                scaled = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, weights)
            optimizer.apply(exchange(gradients) if exchange else gradients, weights)
            mean_loss.update_state(loss)
            accuracy.update_state(y, logits)

    return _with_metrics(train, mean_loss, accuracy)


def mirrored(model: keras.Model, strategy: tf.distribute.Strategy, batch_size: int) -> Loop:
    """Returns the training loop for the replicas of a strategy.

    Args:
        model: A model that was compiled in the strategy's scope, whose optimizer is used.
        strategy: TensorFlow's strategy, with even per-replica batches.
        batch_size: Global batch size.
    """
    optimizer, weights = model.optimizer, model.trainable_variables
    with strategy.scope():
        optimizer.build(weights)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        x, y = batch
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_of(y, logits), global_batch_size=batch_size)
            scaled = optimizer.scale_loss(loss)
        # Keras's optimizer sums the gradients over the replicas.
        optimizer.apply(tape.gradient(scaled, weights), weights)
        accuracy.update_state(y, logits)
        return loss

    @tf.function
    def train(iterator: Iterator[Any], num_steps: tf.Tensor) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(num_steps):
            losses = strategy.run(step, args=(next(iterator),))
            total += strategy.reduce("SUM", losses, axis=None)
        return total / tf.cast(num_steps, tf.float32)

    def run(iterator: Iterator[Any], num_steps: int) -> float:
        accuracy.reset_state()
        loss = float(train(iterator, tf.constant(num_steps)))
        float(accuracy.result())
        return loss

    return run


def evaluating(model: keras.Model) -> Loop:
    """Returns the evaluation loop for one device."""
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mean_loss = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @tf.function
    def evaluate(iterator: Iterator[Any], num_steps: tf.Tensor) -> None:
        for _ in tf.range(num_steps):
            x, y = next(iterator)
            logits = model(x, training=False)
            mean_loss.update_state(loss_of(y, logits))
            accuracy.update_state(y, logits)

    return _with_metrics(evaluate, mean_loss, accuracy)


def predicting(model: keras.Model) -> Loop:
    """Returns the prediction loop for one device; it returns the mean of the outputs."""

    @tf.function
    def outputs_of(x: tf.Tensor) -> tf.Tensor:
        return model(x, training=False)

    def run(iterator: Iterator[Any], num_steps: int) -> float:
        batches = (next(iterator) for _ in range(num_steps))
        return float(np.concatenate([outputs_of(x).numpy() for x, _ in batches]).mean())

    return run


def _with_metrics(
    loop: Callable[[Iterator[Any], tf.Tensor], None],
    mean_loss: keras.metrics.Metric,
    accuracy: keras.metrics.Metric,
) -> Loop:
    """Returns a loop that resets the metrics before the graph runs and reads them after it."""

    def run(iterator: Iterator[Any], num_steps: int) -> float:
        mean_loss.reset_state()
        accuracy.reset_state()
        loop(iterator, tf.constant(num_steps))
        float(accuracy.result())
        return float(mean_loss.result())

    return run
