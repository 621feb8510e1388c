"""VGG16: thirteen 3x3 convolutions and three dense layers.

Source: Simonyan and Zisserman 2015, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", configuration D.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdist.models.builders import application


def vgg16(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    scale: float | None = None,
    weights: application.Weights = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds `keras.applications.VGG16`.

    Example:
        >>> from tfdist import models
        >>> models.vgg16((32, 32, 3), 10).output_shape
        (None, 10)

    Args:
        input_shape: Shape of one image: height, width, channels; each side at least 32 pixels.
        num_classes: Number of logits.
        scale: Factor for the images, applied on the device.
        weights: `"imagenet"` loads pretrained weights, for images that
            `keras.applications.vgg16.preprocess_input` has prepared.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.
    """
    return application.classifier(
        "vgg16",
        keras.applications.VGG16,
        input_shape,
        num_classes,
        scale=scale,
        weights=weights,
        dtype_policy=dtype_policy,
        features="fc2",
    )
