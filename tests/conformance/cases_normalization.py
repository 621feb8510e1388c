"""Cases of normalization layers, and of states that layers keep."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.support.case import case, compiled
from tests.support.data import images, points, tokens


def _normalized(layer: layers.Layer, **options: Any) -> keras.Model:
    """Returns a model with a normalization layer between two dense layers."""
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, activation="tanh"), layer, layers.Dense(1)]
    )
    return compiled(model, **options)


@case(points(), sync_batch_norm=True)
def batch_norm() -> keras.Model:
    """BatchNorm with `sync_batch_norm`, on uneven per-replica batches and a single row."""
    return _normalized(layers.BatchNormalization(momentum=0.7), metrics=["mae"])


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
    return _normalized(layer)


@case(points())
def group_norm() -> keras.Model:
    """GroupNormalization."""
    return _normalized(layers.GroupNormalization(2))


@case(points())
def layer_norm() -> keras.Model:
    """LayerNormalization."""
    return _normalized(layers.LayerNormalization())


@case(points())
def spectral_norm() -> keras.Model:
    """SpectralNormalization, whose vector is updated at every step."""
    return _normalized(layers.SpectralNormalization(layers.Dense(3)))


class RunningMean(layers.Layer):
    """Subtracts the moving mean of the batches before this one."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[-1:], trainable=False, name="mean")

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs - self.mean
        if training:
            self.mean.assign(0.7 * self.mean + 0.3 * ops.mean(inputs, axis=0))
        return outputs


@case(points())
def layer_state() -> keras.Model:
    """A custom layer with a moving mean over batches."""
    return _normalized(RunningMean())
