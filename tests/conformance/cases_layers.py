"""Cases of what a model is made of: gradients of every kind, normalisation, state."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.conformance.case import case, compiled, mlp
from tests.conformance.data import images, points, tokens


def _embedded(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 2),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    return compiled(model, optimizer)


@case(tokens())
def embedding() -> keras.Model:
    """An embedding, whose gradients are sparse."""
    return _embedded(keras.optimizers.SGD(0.1, momentum=0.9))


@case(tokens())
def embedding_clipped() -> keras.Model:
    """An embedding's sparse gradients clipped together with dense ones."""
    return _embedded(keras.optimizers.SGD(0.3, global_clipnorm=0.3))


@case(tokens())
def embedding_adam() -> keras.Model:
    """An embedding trained by Adam."""
    return _embedded(keras.optimizers.Adam(0.05, epsilon=1e-2))


class Unused(layers.Layer):
    """A layer with a weight that takes no part in the loss."""

    def build(self, shape: Any) -> None:
        """Makes the weight."""
        self.idle = self.add_weight(shape=(2,), initializer="ones", name="idle")

    def call(self, inputs: Any) -> Any:
        """Passes [rows, ...] on unchanged."""
        return inputs


@case(points())
def no_gradient() -> keras.Model:
    """A weight without a gradient."""
    model = mlp()
    model.add(Unused())
    return compiled(model)


@case(points())
def frozen_layer() -> keras.Model:
    """A layer that is not trained."""
    model = mlp()
    model.layers[0].trainable = False
    return compiled(model)


class Tied(keras.Model):
    """Codes and decodes with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(4, 2), initializer="glorot_uniform", name="kernel")

    def call(self, inputs: Any) -> Any:
        """Maps [rows, 4] to [rows, 4]."""
        return ops.tanh(inputs @ self.kernel) @ ops.transpose(self.kernel)


@case(points(outputs=4))
def tied_weights() -> keras.Model:
    """A weight that is used twice."""
    return compiled(Tied())


@case(points())
def nested_model() -> keras.Model:
    """A model inside a model, called twice."""
    inner = mlp(outputs=4, activation="tanh")
    inputs = keras.Input((4,))
    return compiled(keras.Model(inputs, layers.Dense(1)(inner(inner(inputs)))))


def _normalised(layer: layers.Layer, **options: Any) -> keras.Model:
    """A layer of normalisation between two dense ones."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(4, activation="tanh"),
            layer,
            layers.Dense(1),
        ]
    )
    return compiled(model, **options)


@case(points(), sync_batch_norm=True)
def batch_norm() -> keras.Model:
    """BatchNorm with `sync_batch_norm`, on uneven shares and a single row."""
    return _normalised(layers.BatchNormalization(momentum=0.7), metrics=["mae"])


@case(images(), sync_batch_norm=True)
def batch_norm_images() -> keras.Model:
    """BatchNorm between convolutions with `sync_batch_norm`."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(2, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.7),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2, activation="softmax"),
        ]
    )
    return compiled(model, loss="sparse_categorical_crossentropy", metrics=["accuracy"])


@case(tokens(empty=()), sync_batch_norm=True)
def batch_norm_masked() -> keras.Model:
    """BatchNorm of masked steps with `sync_batch_norm`."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 3, mask_zero=True),
            layers.BatchNormalization(momentum=0.7),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    return compiled(model)


@case(points(), sync_batch_norm=True)
def batch_norm_nested() -> keras.Model:
    """BatchNorm in a nested model with `sync_batch_norm`."""
    inner = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4), layers.BatchNormalization(momentum=0.7)]
    )
    return compiled(keras.Sequential([keras.Input((4,)), inner, layers.Dense(1)]))


@case(points(), sync_batch_norm=True)
def batch_norm_frozen() -> keras.Model:
    """A frozen BatchNorm, which keeps its moving statistics."""
    layer = layers.BatchNormalization(momentum=0.7)
    layer.trainable = False
    return _normalised(layer)


@case(points())
def group_norm() -> keras.Model:
    """GroupNormalization."""
    return _normalised(layers.GroupNormalization(2))


@case(points())
def layer_norm() -> keras.Model:
    """LayerNormalization."""
    return _normalised(layers.LayerNormalization())


@case(points())
def spectral_norm() -> keras.Model:
    """SpectralNormalization, whose vector is updated at every step."""
    return _normalised(layers.SpectralNormalization(layers.Dense(3)))


@case(points())
def attention() -> keras.Model:
    """Multi-head attention."""
    inputs = keras.Input((4,))
    sequence = layers.Reshape((4, 1))(inputs)
    hidden = layers.MultiHeadAttention(2, 2)(sequence, sequence)
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden))))


class RunningMean(layers.Layer):
    """Subtracts the moving mean of the batches before this one."""

    def build(self, shape: Any) -> None:
        """Makes the moving mean of shape [features]."""
        self.mean = self.add_weight(shape=shape[-1:], trainable=False, name="mean")

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Maps [rows, features] to [rows, features]."""
        outputs = inputs - self.mean
        if training:
            self.mean.assign(0.7 * self.mean + 0.3 * ops.mean(inputs, axis=0))
        return outputs


@case(points())
def layer_state() -> keras.Model:
    """A layer of one's own that keeps a moving mean of its batches."""
    return _normalised(RunningMean())
