"""Cases of random numbers: dropout, noise, augmentation, and draws in a custom step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tests.support.case import case, compiled
from tests.support.data import images, points, tokens


def _dense(*random: layers.Layer, width: int = 6) -> keras.Model:
    hidden = layers.Dense(width, activation="tanh")
    return compiled(keras.Sequential([keras.Input((4,)), hidden, *random, layers.Dense(1)]))


@case(points(), is_random=True)
def dropout() -> keras.Model:
    """Dropout."""
    return _dense(layers.Dropout(0.4, seed=3))


@case(points(), is_random=True)
def dropout_aligned() -> keras.Model:
    """Dropout of a width that is a multiple of Philox's groups of four."""
    return _dense(layers.Dropout(0.4, seed=3), width=8)


@case(points(), accumulate=2, is_random=True)
def dropout_accumulate() -> keras.Model:
    """The trainer's `accumulate` with dropout."""
    return _dense(layers.Dropout(0.4, seed=3))


@case(points(), is_random=True)
def noise_layers() -> keras.Model:
    """Gaussian noise, Gaussian dropout and alpha dropout."""
    return _dense(
        layers.GaussianNoise(0.3, seed=1),
        layers.GaussianDropout(0.3, seed=2),
        layers.AlphaDropout(0.3, seed=3),
    )


@case(tokens(empty=()), is_random=True)
def dropout_in_sequences() -> keras.Model:
    """Dropout of channels, of attention, and inside a recurrent layer."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.SpatialDropout1D(0.3, seed=1)(layers.Embedding(7, 4)(inputs))
    x = layers.MultiHeadAttention(2, 3, dropout=0.3, seed=2)(x, x)
    x = layers.LSTM(3, dropout=0.3, recurrent_dropout=0.2, seed=4)(x)
    return compiled(keras.Model(inputs, layers.Dense(1)(x)))


@case(images(), is_random=True)
def augmentation() -> keras.Model:
    """Random augmentation of images inside the model."""
    return compiled(
        keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.RandomFlip(seed=1),
                layers.RandomTranslation(0.2, 0.2, seed=2),
                layers.RandomContrast(0.3, seed=3),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
    )


class Draws(layers.Layer):
    """Adds random numbers of several distributions to its inputs, and to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def build(self, shape: Any) -> None:
        """Creates a weight whose first axis is as long as no batch."""
        self.kernel = self.add_weight(shape=(3, shape[-1]), name="kernel")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        rows, width = ops.shape(inputs)
        seed = self.seed
        truncated = keras.random.truncated_normal((rows, width), seed=seed)
        pieces = keras.random.uniform((rows * 3, 5), -1, 1, seed=seed)
        pieces = ops.mean(ops.reshape(pieces, (rows, 15)), axis=-1, keepdims=True)
        integers = ops.cast(keras.random.randint((rows, 1), 0, 3, seed=seed), inputs.dtype)
        picked = keras.random.categorical(inputs, 2, dtype=inputs.dtype, seed=seed)
        gamma = keras.random.gamma((rows, 1), 2.0, seed=seed)
        beta = keras.random.beta((rows, 1), 2.0, ops.exp(inputs[:, :1]), seed=seed)
        integers += ops.mean(picked, axis=1, keepdims=True) + ops.stop_gradient(gamma + beta)
        noise = keras.random.normal((3, width), seed=seed)
        weights = ops.mean(self.kernel + noise, axis=0)
        return inputs + 0.2 * (truncated + pieces + integers) * weights


@case(points(), is_random=True)
def draws() -> keras.Model:
    """Draws of every distribution, several per row, and noise on a weight."""
    return compiled(keras.Sequential([keras.Input((4,)), Draws(), layers.Dense(1)]))


class Denoising(keras.Sequential):
    """Learns to remove noise from its inputs, in a custom `train_step`."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        noise = keras.random.normal(ops.shape(x), seed=self.seed)
        time = keras.random.uniform((ops.shape(x)[0], 1), seed=self.seed)
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x + time * noise, training=True) - noise) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"noise": loss}


@case(points(), is_random=True)
def own_step_with_noise() -> keras.Model:
    """`train_step` overridden by one that draws noise and times, as diffusion models do."""
    hidden = layers.Dense(3, activation="tanh")
    model = Denoising([keras.Input((4,)), hidden, layers.Dropout(0.2, seed=5), layers.Dense(4)])
    model.seed = keras.random.SeedGenerator(7)
    return compiled(model)


class Sampling(layers.Layer):
    """Draws from the distribution whose mean and log-variance it gets, as an autoencoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(11)

    def call(self, inputs: Any) -> Any:
        """Maps [rows, 2 * latents] to [rows, latents], and adds the divergence from a normal."""
        mean, log_variance = ops.split(inputs, 2, axis=-1)
        divergence = ops.exp(log_variance) + mean**2 - 1 - log_variance
        self.add_loss(0.05 * ops.mean(ops.sum(divergence, axis=-1)))
        noise = keras.random.normal(ops.shape(mean), seed=self.seed)
        return mean + ops.exp(0.5 * log_variance) * noise


@case(points(outputs=4), is_random=True)
def variational_autoencoder() -> keras.Model:
    """A variational autoencoder, which draws its latent variables."""
    hidden = layers.Dense(4, activation="tanh")
    return compiled(keras.Sequential([keras.Input((4,)), hidden, Sampling(), layers.Dense(4)]))


class Adversaries(keras.Model):
    """A generator of rows from noise, and a critic, each with its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
        self.critic = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(3, "tanh"),
                layers.Dropout(0.3, seed=2),
                layers.Dense(1),
            ]
        )
        self.critic_optimizer = keras.optimizers.SGD(0.1)
        self.seed = keras.random.SeedGenerator(13)
        self.built = True

    def call(self, x: Any) -> Any:
        """Maps noise [rows, 4] to rows of the same shape."""
        return self.generator(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        noise = keras.random.normal(ops.shape(x), seed=self.seed)
        mixed = keras.random.uniform((ops.shape(x)[0], 1), seed=self.seed)
        with tf.GradientTape() as tape:
            generated = self.generator(noise, training=True)
            real = ops.softplus(-self.critic(x, training=True))
            loss = ops.mean(mixed * real + ops.softplus(self.critic(generated, training=True)))
        weights = self.critic.trainable_variables
        self.critic_optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            generated = self.generator(noise, training=True)
            fooled = ops.mean(ops.softplus(-self.critic(generated, training=True)))
        weights = self.generator.trainable_variables
        self.optimizer.apply(tape.gradient(fooled, weights), weights)
        return {"critic": loss, "fooled": fooled}


@case(points(outputs=4), is_random=True)
def adversarial_step_with_noise() -> keras.Model:
    """`train_step` overridden by that of a GAN: two optimizers, noise, and dropout."""
    return compiled(Adversaries())
