"""Generative models without a custom `train_step`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import program
from tests.programs.rows import normal
from tests.support.case import compiled
from tests.support.data import Data

IMAGES = Data(np.abs(np.sin(normal(8, 8, 1))), np.abs(np.sin(normal(8, 8, 1))))


@program(IMAGES, quick=True)
def denoising_autoencoder() -> keras.Model:
    """A denoising autoencoder of strided and transposed convolutions."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(3, 3, activation="relu", padding="same")(inputs)
    x = layers.Conv2D(3, 3, activation="relu", padding="same")(layers.MaxPooling2D(2)(x))
    x = layers.Conv2DTranspose(3, 3, strides=2, activation="relu", padding="same")(x)
    x = layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x)
    return compiled(keras.Model(inputs, x), "adam", "binary_crossentropy")


class MaskedConvolution(layers.Layer):
    """A convolution over the pixels above and to the left."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.conv = layers.Conv2D(filters, 3, padding="same")

    def build(self, shape: Any) -> None:
        self.conv.build(shape)
        self.mask = np.zeros(self.conv.kernel.shape)
        self.mask[0], self.mask[1, :1] = 1.0, 1.0

    def call(self, x: Any) -> Any:
        kernel = self.conv.kernel * ops.cast(self.mask, self.conv.kernel.dtype)
        return ops.conv(x, kernel, padding="same") + self.conv.bias


@program(Data((normal(8, 8, 1) > 0).astype("float64"), (normal(8, 8, 1) > 0).astype("float64")))
def pixel_cnn() -> keras.Model:
    """PixelCNN: convolutions with masked kernels."""
    inputs = keras.Input((8, 8, 1))
    x = layers.ReLU()(MaskedConvolution(3)(inputs))
    x = layers.ReLU()(MaskedConvolution(3)(x) + x)
    x = layers.Conv2D(1, 1, activation="sigmoid")(x)
    return compiled(keras.Model(inputs, x), keras.optimizers.Adam(5e-4), "binary_crossentropy")


def _gram(x: Any) -> Any:
    """Returns the Gram matrix of the channels, for each image."""
    flat = ops.reshape(x, (-1, x.shape[1] * x.shape[2], x.shape[3]))
    return ops.transpose(flat, (0, 2, 1)) @ flat


class Stylised(keras.Model):
    """A model whose `compute_loss` compares features of a frozen network."""

    def __init__(self) -> None:
        super().__init__()
        self.paint = layers.Conv2D(1, 3, padding="same")
        self.features = layers.Conv2D(3, 3, activation="relu", trainable=False)

    def call(self, inputs: Any) -> Any:
        return self.paint(inputs)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        """Returns the difference of the Gram matrices plus that of the images."""
        ours, theirs = _gram(self.features(y_pred)), _gram(self.features(y))
        style = ops.mean(ops.square(ours - theirs)) / 100.0
        return style + ops.mean(ops.square(y_pred - y))


@program(IMAGES, may_refuse=True)
def style_transfer() -> keras.Model:
    """Style transfer: Gram matrices of a frozen network, in `compute_loss`."""
    model = Stylised()
    model(np.zeros((1, 8, 8, 1)))
    model.features(np.zeros((1, 8, 8, 1)))
    return compiled(model, "adam", None)


class Coupling(keras.Model):
    """A real-valued flow: each half of a vector transforms the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [layers.Dense(2, activation="tanh") for _ in range(2)]
        self.shifts = [layers.Dense(2) for _ in range(2)]

    def call(self, x: Any) -> Any:
        """Maps [rows, 2] to a point and the log of its determinant: [rows, 3]."""
        total = 0.0
        for i, (scale, shift) in enumerate(zip(self.scales, self.shifts, strict=True)):
            mask = ops.convert_to_tensor([float(i), 1.0 - i], x.dtype)
            s, t = scale(x * mask) * (1 - mask), shift(x * mask) * (1 - mask)
            x = (1 - mask) * (x * ops.exp(s) + t) + mask * x
            total += ops.sum(s, 1, keepdims=True)
        return ops.concatenate([x, total], 1)


@program(Data(normal(2), normal(1)))
def normalising_flow() -> keras.Model:
    """A normalizing flow trained on the likelihood."""

    def likelihood(_: Any, made: Any) -> Any:
        return ops.sum(0.5 * ops.square(made[:, :2]), 1) - made[:, 2]

    return compiled(Coupling(), keras.optimizers.Adam(1e-3), likelihood)


@program(Data([np.abs(np.sin(normal(8, 8, 1))), normal(1)], normal(8, 8, 1, seed=3)))
def noise_predicted() -> keras.Model:
    """A diffusion network with a sinusoidal embedding of the noise level."""
    picture, level = keras.Input((8, 8, 1)), keras.Input((1,))
    angles = level * ops.convert_to_tensor([[1.0, 2.0, 4.0]], level.dtype)
    code = layers.Dense(3, activation="swish")(
        ops.concatenate([ops.sin(angles), ops.cos(angles)], -1)
    )
    x = layers.Conv2D(3, 3, padding="same")(picture) + layers.Reshape((1, 1, 3))(code)
    x = layers.GroupNormalization(groups=3)(x)
    x = layers.Conv2D(1, 3, padding="same", kernel_initializer="zeros")(ops.silu(x))
    return compiled(keras.Model([picture, level], x), keras.optimizers.AdamW(1e-3), "mae")
