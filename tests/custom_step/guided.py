"""Models trained with a teacher, with pseudo-labels, or with rewards."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tests.custom_step.registry import Noisy, dense, labels_of, model


@model()
class Distillation(Noisy):
    """A frozen teacher, compiled loss and metrics, and a custom `test_step`."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.teacher = keras.Sequential([keras.Input((6,)), dense(4, "tanh"), dense(3)])
        self.student = keras.Sequential([keras.Input((6,)), dense(3)])
        self.teacher.trainable = False

    def ready(self) -> keras.Model:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
        self.compile(keras.optimizers.RMSprop(0.02, epsilon=1e-2), loss, metrics=metrics)
        return self

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, x: Any) -> dict[str, Any]:
        y = labels_of(x)
        soft = ops.softmax(self.teacher(x, training=False) / 2.0)
        with tf.GradientTape() as tape:
            result = self(x, training=True)
            divergence = keras.losses.kl_divergence(soft, ops.softmax(result / 2.0))
            loss = 0.4 * self.compute_loss(x, y, result) + 0.6 * ops.mean(divergence)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        logs = self.compute_metrics(x, y, result)
        return {name: value for name, value in logs.items() if name != "loss"} | {"all": loss}

    def test_step(self, x: Any) -> dict[str, Any]:
        y = labels_of(x)
        result = self(x, training=False)
        return {"hard": self.compute_loss(x, y, result)} | self.compute_metrics(x, y, result)


@model(full_batch="neither a mean nor a sum over rows")
class FixMatch(Noisy):
    """Pseudo-labels for confident rows: the loss is divided by the number of such rows."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.network = keras.Sequential([dense(4, "tanh"), dense(3)])

    def train_step(self, x: Any) -> dict[str, Any]:
        guessed = ops.softmax(self.network(x))
        sure = ops.cast(ops.max(guessed, 1) > 0.4, "float32")
        with tf.GradientTape() as tape:
            logits = self.network(x + 0.3 * self.noise(x))
            cross_entropy = keras.losses.sparse_categorical_crossentropy
            supervised = cross_entropy(labels_of(x), logits, from_logits=True)
            unsupervised = cross_entropy(ops.argmax(guessed, 1), logits, from_logits=True)
            pseudo = ops.sum(unsupervised * sure) / ops.maximum(ops.sum(sure), 1.0)
            loss = ops.mean(supervised) + pseudo
        gradients = tape.gradient(loss, self.network.trainable_variables)
        self.optimizer.apply(gradients, self.network.trainable_variables)
        return {"loss": loss, "sure": ops.mean(sure)}


@model()
class ActorCritic(Noisy):
    """Sums over rows as losses for two networks from one tape, with a random action per row."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.actor, self.critic = dense(2), dense(1)
        self.critic_optimizer = keras.optimizers.SGD(0.02)

    def train_step(self, x: Any) -> dict[str, Any]:
        action = ops.cast(self.noise(x)[:, 0] > 0, "int32")
        reward = ops.where(action == 1, x[:, 0], x[:, 1])
        with tf.GradientTape(persistent=True) as tape:
            log_policy = ops.log_softmax(self.actor(x))
            advantage = reward - ops.squeeze(self.critic(x), 1)
            chosen = ops.sum(ops.one_hot(action, 2) * log_policy, 1)
            actor_loss = -ops.sum(chosen * ops.stop_gradient(advantage)) / 5.0
            critic_loss = ops.sum(advantage**2)
        for network, optimizer, loss in (
            (self.actor, self.optimizer, actor_loss),
            (self.critic, self.critic_optimizer, critic_loss),
        ):
            weights = network.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"actor": actor_loss, "loss": critic_loss, "reward": ops.mean(reward)}
