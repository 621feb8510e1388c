"""The yardstick: the training loop one writes by hand for one model, as TensorFlow's guides do.

The whole loop is in the graph. Sources: "Writing a training loop from scratch in TensorFlow"
(keras.io) and "Custom training with tf.distribute.Strategy" (tensorflow.org); the optimizer is
built beforehand, so that no variable is made inside the loop. The functions of the trainings return
a function that makes a number of steps and returns their mean loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Loop = Callable[[Iterator[Any], int], float]
Exchange = Callable[[list[tf.Tensor]], list[tf.Tensor]]


def on_one_device(model: keras.Model, exchange: Exchange | None = None) -> Loop:
    """Returns the loop for one device, or for one in each of several processes.

    Args:
        model: Compiled, for its optimizer alone.
        exchange: Takes the gradients and returns their means over the processes.
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
            gradients = tape.gradient(loss, weights)
            optimizer.apply(exchange(gradients) if exchange else gradients, weights)
            mean_loss.update_state(loss)
            accuracy.update_state(y, logits)

    return _telling(train, mean_loss, accuracy)


def mirrored(model: keras.Model, strategy: tf.distribute.Strategy, batch_size: int) -> Loop:
    """Returns the loop for the replicas of a strategy.

    Args:
        model: Compiled in the strategy's scope, for its optimizer alone.
        strategy: Whose replicas take even shares of each batch.
        batch_size: Global.
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
        # Keras's optimizer adds the gradients up over the replicas.
        optimizer.apply(tape.gradient(loss, weights), weights)
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
    """Returns the loop that evaluates on one device; it returns the mean loss."""
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

    return _telling(evaluate, mean_loss, accuracy)


def predicting(model: keras.Model) -> Loop:
    """Returns the loop that predicts on one device; it returns the mean of the outputs."""

    @tf.function
    def outputs_of(x: tf.Tensor) -> tf.Tensor:
        return model(x, training=False)

    def run(iterator: Iterator[Any], num_steps: int) -> float:
        batches = (next(iterator) for _ in range(num_steps))
        return float(np.concatenate([outputs_of(x).numpy() for x, _ in batches]).mean())

    return run


def _telling(
    loop: Callable[[Iterator[Any], tf.Tensor], None],
    mean_loss: keras.metrics.Metric,
    accuracy: keras.metrics.Metric,
) -> Loop:
    """Returns a loop of the graph with metrics that begin anew, and are read after it."""

    def run(iterator: Iterator[Any], num_steps: int) -> float:
        mean_loss.reset_state()
        accuracy.reset_state()
        loop(iterator, tf.constant(num_steps))
        float(accuracy.result())
        return float(mean_loss.result())

    return run
