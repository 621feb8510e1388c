"""DenseNet-169: each layer of a block reads the outputs of all earlier ones.

Source: Huang et al. 2017, "Densely Connected Convolutional Networks", table 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdist.models.builders import application


def densenet169(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    scale: float | None = None,
    weights: application.Weights = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds `keras.applications.DenseNet169`.

    Example:
        >>> from tfdist import models
        >>> models.densenet169((32, 32, 3), 10).output_shape
        (None, 10)

    Args:
        input_shape: Shape of one image: height, width, channels; each side at least 32 pixels.
        num_classes: Number of logits.
        scale: Factor for the images, applied on the device.
        weights: `"imagenet"` loads pretrained weights, for images that
            `keras.applications.densenet.preprocess_input` has prepared.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.
    """
    return application.classifier(
        "densenet169",
        keras.applications.DenseNet169,
        input_shape,
        num_classes,
        scale=scale,
        weights=weights,
        dtype_policy=dtype_policy,
    )
