"""Models that compare rows, or views of them, with each other."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tests.custom_step.registry import Noisy, dense, model


def _views(owner: Noisy, x: Any) -> tuple[Any, Any]:
    return x + 0.3 * owner.noise(x), x - 0.3 * owner.noise(x)


def _cross_entropy(logits: Any) -> Any:
    labels = ops.arange(ops.shape(logits)[0])
    rows = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    return ops.mean(rows)


@model(full_batch="neither a mean nor a sum over rows")
class SimCLR(Noisy):
    """A contrastive loss over all pairs of the batch."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.encoder = keras.Sequential([dense(4, "tanh"), dense(3)])
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def train_step(self, x: Any) -> dict[str, Any]:
        one, other = _views(self, x)
        with tf.GradientTape() as tape:
            a, b = (ops.normalize(self.encoder(v), axis=1) for v in (one, other))
            logits = ops.matmul(a, ops.transpose(b)) / 0.3
            loss = (_cross_entropy(logits) + _cross_entropy(ops.transpose(logits))) / 2
        gradients = tape.gradient(loss, self.encoder.trainable_variables)
        self.optimizer.apply(gradients, self.encoder.trainable_variables)
        self.accuracy.update_state(ops.arange(ops.shape(logits)[0]), logits)
        return {"loss": loss, self.accuracy.name: self.accuracy.result()}


@model(full_batch="neither a mean nor a sum over rows")
class MoCo(Noisy):
    """A queue to which each batch is prepended, and a momentum-updated key encoder."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.query = keras.Sequential([keras.Input((6,)), dense(3)])
        self.key = keras.models.clone_model(self.query)
        self.queue = self.add_weight(
            shape=(8, 3), initializer=keras.initializers.RandomNormal(seed=3), trainable=False
        )

    def train_step(self, x: Any) -> dict[str, Any]:
        one, other = _views(self, x)
        keys = ops.stop_gradient(ops.normalize(self.key(other), axis=1))
        with tf.GradientTape() as tape:
            queries = ops.normalize(self.query(one), axis=1)
            positive = ops.sum(queries * keys, 1, keepdims=True)
            logits = ops.concatenate([positive, ops.matmul(queries, ops.transpose(self.queue))], 1)
            labels = ops.zeros(ops.shape(logits)[0], "int32")
            loss = ops.mean(
                keras.losses.sparse_categorical_crossentropy(labels, logits / 0.3, from_logits=True)
            )
        gradients = tape.gradient(loss, self.query.trainable_variables)
        self.optimizer.apply(gradients, self.query.trainable_variables)
        self.queue.assign(ops.concatenate([keys, self.queue], 0)[:8])
        for new, old in zip(self.query.weights, self.key.weights, strict=True):
            old.assign(0.9 * old + 0.1 * new)
        return {"contrast": loss}


@model()
class BYOL(Noisy):
    """A target network that is the moving average of the online network."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.online = keras.Sequential([keras.Input((6,)), dense(4, "tanh"), dense(3)])
        self.target = keras.models.clone_model(self.online)
        self.target.set_weights(self.online.get_weights())
        self.predictor = dense(3)

    def train_step(self, x: Any) -> dict[str, Any]:
        one, other = _views(self, x)
        aim = ops.normalize(self.target(other, training=False), axis=1)
        with tf.GradientTape() as tape:
            result = ops.normalize(self.predictor(self.online(one)), axis=1)
            loss = ops.mean(2 - 2 * ops.sum(result * ops.stop_gradient(aim), 1))
        weights = [*self.online.trainable_variables, *self.predictor.trainable_variables]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for new, old in zip(self.online.weights, self.target.weights, strict=True):
            old.assign(0.8 * old + 0.2 * new)
        return {"contrast": loss}
