"""Networks of `keras.applications`, made as the other builders make theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras

from tfdist.models.builders import head
from tfdist.models.builders.pixels import pixels
from tfdist.precision import policy

#: Where the weights begin: at random, or trained on ImageNet, which Keras downloads once.
Weights = Literal["imagenet"] | None


def classifier(
    name: str,
    make: Callable[..., keras.Model],
    input_shape: Sequence[int],
    num_classes: int,
    *,
    scale: float | None,
    weights: Weights,
    dtype_policy: str | None,
    features: str | None = None,
) -> keras.Model:
    """Puts a head of `num_classes` logits on a network of `keras.applications`.

    Args:
        name: Of the model.
        make: A function of `keras.applications`.
        input_shape: Of one image: height, width, channels.
        num_classes: Number of logits.
        scale: Multiplies the images on their device.
        weights: What the network begins with; its head begins at random in either case.
        dtype_policy: Name of the Keras policy of all layers; None: the global one.
        features: The layer whose output goes into the head; None: the average over the image of
            what the network makes without its top.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.
    """
    top: dict[str, Any] = {"include_top": False, "pooling": "avg"}
    if features:  # dense layers of ImageNet's size: what hangs behind them is left away
        top = {"include_top": True, "classes": 1000 if weights else 1}
    with policy(dtype_policy):  # Keras's functions take none
        inputs, x = pixels(input_shape, scale, dtype_policy)
        made = make(input_tensor=x, weights=weights, **top)
        x = made.get_layer(features).output if features else made.output
        return keras.Model(inputs, head.logits(x, num_classes, dtype_policy), name=name)
