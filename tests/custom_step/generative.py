"""Generative models: VAE, VQ-VAE and diffusion."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.custom_step.registry import Noisy, dense, model


@model()
class VAE(Noisy):
    """Two loss trackers. One loss is a sum over rows divided by the number of rows."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.encoder = dense(4)
        self.decoder = keras.Sequential([dense(3, "tanh"), dense(6)])
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "kl")]

    @property
    def metrics(self) -> list[keras.Metric]:
        return self.trackers

    def losses_of(self, x: Any) -> tuple[Any, Any]:
        mean, log_variance = ops.split(self.encoder(x), 2, 1)
        code = mean + ops.exp(0.5 * log_variance) * self.noise(mean)
        rows = ops.cast(ops.shape(x)[0], "float32")
        reconstruction = ops.sum((self.decoder(code) - x) ** 2) / rows
        kl = -0.5 * (1 + log_variance - mean**2 - ops.exp(log_variance))
        return reconstruction, ops.mean(ops.sum(kl, 1))

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            reconstruction, kl = self.losses_of(x)
            loss = reconstruction + kl
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return self.tracked(loss, kl)

    def test_step(self, x: Any) -> dict[str, Any]:
        reconstruction, kl = self.losses_of(x)
        return self.tracked(reconstruction + kl, kl)

    def tracked(self, loss: Any, kl: Any) -> dict[str, Any]:
        for tracker, value in zip(self.trackers, (loss, kl), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Quantizer(layers.Layer):
    """Maps vectors to the nearest code, and adds the two losses of a VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = self.add_weight(shape=(5, 2), initializer="random_uniform")

    def call(self, x: Any) -> Any:
        distances = ops.sum((x[:, None] - self.codes[None]) ** 2, -1)
        nearest = ops.take(self.codes, ops.argmin(distances, 1), axis=0)
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(nearest) - x) ** 2))
        self.add_loss(ops.mean((nearest - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(nearest - x)


@model()
class VQVAE(Noisy):
    """A nested model with added losses."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.vqvae = keras.Sequential([keras.Input((6,)), dense(2), Quantizer(), dense(6)])

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            reconstruction = ops.mean((self.vqvae(x) - x) ** 2) / 0.8
            loss = reconstruction + sum(self.vqvae.losses)
        gradients = tape.gradient(loss, self.vqvae.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.vqvae.trainable_variables, strict=True))
        return {"loss": loss, "reconstruction": reconstruction, "vq": sum(self.vqvae.losses)}


@model()
class Diffusion(Noisy):
    """A noise strength per row, manual gradient clipping, and averaged weights."""

    def __init__(self, draws: bool) -> None:
        super().__init__(draws)
        self.network = keras.Sequential([keras.Input((7,)), dense(4, "tanh"), dense(6)])
        self.average = keras.models.clone_model(self.network)
        self.average.set_weights(self.network.get_weights())

    def train_step(self, x: Any) -> dict[str, Any]:
        strength = ops.sigmoid(self.noise(x)[:, :1])
        noise = self.noise(x)
        noisy = ops.sqrt(1 - strength) * x + ops.sqrt(strength) * noise
        with tf.GradientTape() as tape:
            result = self.network(ops.concatenate([noisy, strength], 1), training=True)
            loss = self.compute_loss(x=x, y=noise, y_pred=result)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.2)
        self.optimizer.apply(gradients, self.network.trainable_weights)
        for new, old in zip(self.network.weights, self.average.weights, strict=True):
            old.assign(0.9 * old + 0.1 * new)
        return {"loss": loss, "norm": norm}
