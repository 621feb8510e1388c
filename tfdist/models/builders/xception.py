"""Xception: separable convolutions with residuals.

Source: Chollet 2017, "Xception: Deep Learning with Depthwise Separable Convolutions".
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdist.models.builders import application


def xception(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    scale: float | None = None,
    weights: application.Weights = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds `keras.applications.Xception`.

    Example:
        >>> from tfdist import models
        >>> models.xception((71, 71, 3), 10).output_shape
        (None, 10)

    Args:
        input_shape: Shape of one image: height, width, channels; each side at least 71 pixels.
        num_classes: Number of logits.
        scale: Factor for the images, applied on the device.
        weights: `"imagenet"` loads pretrained weights, for images that
            `keras.applications.xception.preprocess_input` has prepared.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.
    """
    return application.classifier(
        "xception",
        keras.applications.Xception,
        input_shape,
        num_classes,
        scale=scale,
        weights=weights,
        dtype_policy=dtype_policy,
    )
