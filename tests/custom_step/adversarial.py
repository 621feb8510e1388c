"""Small models with adversarial training: several networks, optimizers and losses per step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.custom_step.registry import Noisy, dense, model

_CROSS_ENTROPY = keras.losses.BinaryCrossentropy(from_logits=True)


def _adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.05, epsilon=1e-2)


@model(image=True)
class DCGAN(Noisy):
    """Two optimizers, passed to an overridden `compile`. Real and fake rows form one batch."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.discriminator = keras.Sequential(
            [layers.Conv2D(2, 3, activation="leaky_relu"), layers.Flatten(), layers.Dense(1)]
        )
        self.generator = keras.Sequential(
            [
                layers.Dense(8, activation="leaky_relu"),
                layers.Reshape((2, 2, 2)),
                layers.Conv2DTranspose(1, 2, strides=2, activation="tanh"),
            ]
        )
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = loss_fn

    def ready(self) -> keras.Model:
        self.compile(_adam(), keras.optimizers.SGD(0.1, momentum=0.5), _CROSS_ENTROPY)
        return self

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.d_loss, self.g_loss]

    def train_step(self, images: Any) -> dict[str, Any]:
        rows = ops.shape(images)[0]
        codes = self.noise(images[:, 0, :, 0])
        both = ops.concatenate([self.generator(codes), images], 0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            logits = self.discriminator(self.generator(codes))
            g_loss = self.loss_fn(ops.zeros((rows, 1)), logits)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


@model()
class WGANGP(Noisy):
    """A critic with three updates per step, and a gradient penalty on its inputs."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.critic = keras.Sequential([dense(4, "tanh"), dense(1)])
        self.generator = keras.Sequential([dense(4, "tanh"), dense(6)])
        self.c_optimizer, self.g_optimizer = _adam(), _adam()

    def train_step(self, x: Any) -> dict[str, Any]:
        for _ in range(3):
            with tf.GradientTape() as tape:
                fake = self.generator(self.noise(x))
                loss = ops.mean(self.critic(fake)) - ops.mean(self.critic(x))
                penalty = self.penalty(x, fake)
                c_loss = loss + 2.0 * penalty
            weights = self.critic.trainable_weights
            self.c_optimizer.apply(tape.gradient(c_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = -ops.mean(self.critic(self.generator(self.noise(x))))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return {"c_loss": c_loss, "g_loss": g_loss, "penalty": penalty}

    def penalty(self, x: Any, fake: Any) -> Any:
        share = ops.sigmoid(self.noise(x)[:, :1])
        between = share * x + (1 - share) * fake
        with tf.GradientTape() as tape:
            tape.watch(between)
            value = self.critic(between)
        gradient = tape.gradient(value, [between])[0]
        return ops.mean((ops.sqrt(ops.sum(gradient**2, 1) + 1e-6) - 1.0) ** 2)


@model()
class CycleGAN(Noisy):
    """Two generators, two discriminators, and four optimizers that share one persistent tape."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.nets = {
            name: keras.Sequential([dense(4, "tanh"), dense(1 if name[0] == "d" else 3)])
            for name in ("gf", "gb", "df", "db")
        }
        self.optimizers = {name: _adam() for name in self.nets}

    def train_step(self, x: Any) -> dict[str, Any]:
        a, b = x[:, :3], x[:, 3:]
        nets = self.nets
        with tf.GradientTape(persistent=True) as tape:
            like_b, like_a = nets["gf"](a), nets["gb"](b)
            cycle = ops.mean(ops.abs(nets["gb"](like_b) - a) + ops.abs(nets["gf"](like_a) - b))
            losses = {
                "gf": ops.mean((nets["db"](like_b) - 1.0) ** 2) + cycle,
                "gb": ops.mean((nets["df"](like_a) - 1.0) ** 2) + cycle,
                "df": ops.mean((nets["df"](a) - 1.0) ** 2 + nets["df"](like_a) ** 2),
                "db": ops.mean((nets["db"](b) - 1.0) ** 2 + nets["db"](like_b) ** 2),
            }
        weights = {name: net.trainable_variables for name, net in nets.items()}
        gradients = {name: tape.gradient(losses[name], weights[name]) for name in nets}
        for name, optimizer in self.optimizers.items():
            optimizer.apply(gradients[name], weights[name])
        return losses
