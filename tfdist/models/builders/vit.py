"""A vision transformer.

Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words"; sizes of table 1 there and of
Touvron et al. 2021, "Training data-efficient image transformers", table 1. As in Beyer, Zhai and
Kolesnikov 2022, "Better plain ViT baselines for ImageNet-1k", the classifier reads the average of
all tokens instead of a class token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import keras
from keras import layers

from tfdist.models.builders import head
from tfdist.models.builders.gpt import block
from tfdist.models.builders.head import pixels

#: Number of blocks, width and number of heads.
SIZES = {"micro": (4, 64, 4), "tiny": (12, 192, 3), "small": (12, 384, 6), "base": (12, 768, 12)}


def vit(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    size: Literal["micro", "tiny", "small", "base"] = "small",
    patch: int = 16,
    dropout: float = 0.0,
    scale: float | None = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds transformer blocks over the patches of an image.

    Example:
        >>> from tfdist import models
        >>> models.vit((32, 32, 3), 10, size="micro", patch=8).output_shape
        (None, 10)

    Args:
        input_shape: Shape of one image: height, width, channels; the sides are multiples of
            `patch`.
        num_classes: Number of logits.
        size: The papers' `tiny` (5.7 M weights at 224 pixels), `small` (22 M) or `base` (86 M);
            `micro` is for small images.
        patch: Side of a patch in pixels.
        dropout: Dropout rate; see `transformer.block`.
        scale: Factor for the images, applied on the device.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.
    """
    depth, width, num_heads = SIZES[size]
    height, breadth, channels = input_shape
    rows, columns = height // patch, breadth // patch
    inputs, x = pixels(input_shape, scale, dtype_policy)
    x = layers.Reshape((rows, patch, columns, patch, channels), dtype=dtype_policy)(x)
    x = layers.Permute((1, 3, 2, 4, 5), dtype=dtype_policy)(x)
    x = layers.Reshape((rows * columns, patch * patch * channels), dtype=dtype_policy)(x)
    # A bias per position is a learned position embedding.
    x = layers.EinsumDense(
        "bpi,io->bpo",
        (rows * columns, width),
        bias_axes="po",
        bias_initializer=keras.initializers.RandomNormal(stddev=0.02),
        dtype=dtype_policy,
        name="patches_and_places",
    )(x)
    if dropout:
        x = layers.Dropout(dropout, dtype=dtype_policy)(x)
    for _ in range(depth):
        x = block(
            x, num_heads, causal=False, dropout=dropout, epsilon=1e-6, dtype_policy=dtype_policy
        )
    x = layers.LayerNormalization(epsilon=1e-6, dtype=dtype_policy)(x)
    x = layers.GlobalAveragePooling1D(dtype=dtype_policy)(x)
    return keras.Model(inputs, head.logits(x, num_classes, dtype_policy), name="vit")
