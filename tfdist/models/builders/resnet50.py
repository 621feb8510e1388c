"""ResNet-50: bottlenecks of three convolutions.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition", table 1. Keras's has, as the
paper's own, the strides in the first convolution of a bottleneck, and biases in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdist.models.builders import application


def resnet50(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    zero_gamma: bool = False,
    scale: float | None = None,
    weights: application.Weights = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds `keras.applications.ResNet50`.

    Example:
        >>> from tfdist import models
        >>> models.resnet50((32, 32, 3), 10).output_shape
        (None, 10)

    Args:
        input_shape: Of one image: height, width, channels; each side at least 32 pixels.
        num_classes: Number of logits.
        zero_gamma: Each block's last BatchNorm begins with a scale of zero, and so each block as
            the identity (Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 5.1).
        scale: Multiplies the images on their device.
        weights: `"imagenet"` begins with Keras's, for images as
            `keras.applications.resnet.preprocess_input` makes them.
        dtype_policy: Name of the Keras policy of all layers; None: the global one.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.
    """
    model = application.classifier(
        "resnet50",
        keras.applications.ResNet50,
        input_shape,
        num_classes,
        scale=scale,
        weights=weights,
        dtype_policy=dtype_policy,
    )
    if zero_gamma:
        for layer in model.layers:
            if layer.name.endswith("3_bn"):  # of a bottleneck's three
                layer.gamma_initializer = keras.initializers.Zeros()  # a copy begins likewise
                layer.gamma.assign(keras.ops.zeros(layer.gamma.shape))
    return model
