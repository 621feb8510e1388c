"""ResNet-50: bottleneck blocks of three convolutions.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition", table 1. As in Keras and
in the paper, the first convolution of a bottleneck has the strides; all have biases, as in Keras.
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
        input_shape: Shape of one image: height, width, channels; each side at least 32 pixels.
        num_classes: Number of logits.
        zero_gamma: Initialize the scale of each block's last BatchNorm with zero, so that each
            block starts as the identity (Goyal et al. 2017, "Accurate, Large Minibatch SGD",
            section 5.1).
        scale: Factor for the images, applied on the device.
        weights: `"imagenet"` loads pretrained weights, for images that
            `keras.applications.resnet.preprocess_input` has prepared.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

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
            if layer.name.endswith("3_bn"):  # the last of the bottleneck
                layer.gamma_initializer = keras.initializers.Zeros()  # for clones of the model
                layer.gamma.assign(keras.ops.zeros(layer.gamma.shape))
    return model
