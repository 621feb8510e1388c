"""Small networks of `tfdist.models`, with synchronized BatchNorm.

`applications.py` has those of `keras.applications`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.programs.program import program
from tests.programs.rows import integers, normal, pictures, sentences
from tests.programs.vision import of_classes
from tests.support.case import compiled
from tests.support.data import Data
from tfdist import models


def trained(model: keras.Model, loss: Any = None) -> keras.Model:
    """Compiles a network with gradient descent, which reveals a gradient of the wrong scale."""
    return compiled(model, keras.optimizers.SGD(0.01), loss or of_classes())


def next_tokens(length: int = 6, words: int = 11) -> Data:
    """Returns x: int32 [rows, length], y: the next tokens, of the same shape."""
    tokens = integers(words, length + 1)
    return Data(tokens[:, :-1], tokens[:, 1:])


@program(pictures(), sync_batch_norm=True)
def cnn() -> keras.Model:
    """`models.cnn` with BatchNorm."""
    return trained(models.cnn((8, 8, 1), 3, filters=(4, 8), units=8, batch_norm=True))


@program(pictures())
def mlp() -> keras.Model:
    """`models.mlp`."""
    return trained(models.mlp((8, 8, 1), 3))


@program(Data(normal(67, 67, 1), integers(3)), epochs=1)
def alexnet() -> keras.Model:
    """`models.alexnet` in one column."""
    return trained(models.alexnet((67, 67, 1), 3, width=0.05, dropout=0.0))


@program(Data(normal(67, 67, 1), integers(3)), epochs=1)
def alexnet_in_two_columns() -> keras.Model:
    """`models.alexnet` in two columns."""
    return trained(models.alexnet((67, 67, 1), 3, columns=2, width=0.05, dropout=0.0))


@program(pictures(), sync_batch_norm=True)
def resnet18() -> keras.Model:
    """`models.resnet18` whose residual blocks start as the identity."""
    options: dict[str, Any] = {"width": 4, "num_blocks": (1, 1), "zero_gamma": True}
    return trained(models.resnet18((8, 8, 1), 3, **options))


@program(pictures(16), sync_batch_norm=True)
def resnet18_of_large_images() -> keras.Model:
    """`models.resnet18` with the stem for ImageNet."""
    return trained(models.resnet18((16, 16, 1), 3, width=4, num_blocks=(1, 1), stem="large"))


@program(pictures())
def vit() -> keras.Model:
    """`models.vit`."""
    return trained(models.vit((8, 8, 1), 3, size="micro", patch=4))


@program(Data(np.abs(normal(8, 8, 1)) % 1, np.abs(normal(8, 8, 1)) % 1))
def autoencoder() -> keras.Model:
    """`models.autoencoder`."""
    model = models.autoencoder((8, 8, 1), filters=(4, 4))
    return trained(model, keras.losses.BinaryCrossentropy())


@program(Data(normal(8, 8, 1), integers(3, 8, 8)), sync_batch_norm=True)
def unet() -> keras.Model:
    """`models.unet` with BatchNorm."""
    return trained(models.unet((8, 8, 1), 3, filters=2, depth=2, batch_norm=True))


@program(next_tokens(), quick=True)
def gpt() -> keras.Model:
    """`models.gpt`, with tied input and output embeddings."""
    return trained(models.gpt(11, 6, size="tiny"))


@program(sentences())
def lstm() -> keras.Model:
    """`models.lstm` on padded rows."""
    return trained(models.lstm(9, 2, width=4, units=3, mask_zero=True))
