"""Networks of `keras.applications` as published: VGG16, ResNet-50, DenseNet-169 and Xception.

Sources: Simonyan and Zisserman 2015, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", configuration D; He et al. 2016, "Deep Residual Learning for Image Recognition", table
1; Huang et al. 2017, "Densely Connected Convolutional Networks", table 1; Chollet 2017, "Xception:
Deep Learning with Depthwise Separable Convolutions".
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdist.models.builders.application import Weights, classifier


def resnet50(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    zero_gamma: bool = False,
    scale: float | None = None,
    weights: Weights = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds `keras.applications.ResNet50`: bottleneck blocks of three convolutions.

    As in the paper, the first convolution of a bottleneck has the strides. All have biases.

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
    model = classifier(
        "resnet50", keras.applications.ResNet50, input_shape, num_classes,
        scale=scale, weights=weights, dtype_policy=dtype_policy,
    )  # fmt: skip
    if zero_gamma:
        for layer in model.layers:
            if layer.name.endswith("3_bn"):  # the last of the bottleneck
                layer.gamma_initializer = keras.initializers.Zeros()  # for clones of the model
                layer.gamma.assign(keras.ops.zeros(layer.gamma.shape))
    return model


def vgg16(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    scale: float | None = None,
    weights: Weights = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds `keras.applications.VGG16`: thirteen 3x3 convolutions and three dense layers.

    The arguments are as for `resnet50`; `keras.applications.vgg16.preprocess_input` prepares images
    for pretrained weights.

    Example:
        >>> from tfdist import models
        >>> models.vgg16((32, 32, 3), 10).output_shape
        (None, 10)
    """
    return classifier(
        "vgg16", keras.applications.VGG16, input_shape, num_classes,
        scale=scale, weights=weights, dtype_policy=dtype_policy, features="fc2",
    )  # fmt: skip


def densenet169(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    scale: float | None = None,
    weights: Weights = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds `keras.applications.DenseNet169`: layers read the outputs of all earlier ones.

    The arguments are as for `resnet50`; `keras.applications.densenet.preprocess_input` prepares
    images for pretrained weights.

    Example:
        >>> from tfdist import models
        >>> models.densenet169((32, 32, 3), 10).output_shape
        (None, 10)
    """
    return classifier(
        "densenet169", keras.applications.DenseNet169, input_shape, num_classes,
        scale=scale, weights=weights, dtype_policy=dtype_policy,
    )  # fmt: skip


def xception(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    scale: float | None = None,
    weights: Weights = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds `keras.applications.Xception`: separable convolutions with residuals.

    The arguments are as for `resnet50`, with at least 71 pixels per side;
    `keras.applications.xception.preprocess_input` prepares images for pretrained weights.

    Example:
        >>> from tfdist import models
        >>> models.xception((71, 71, 3), 10).output_shape
        (None, 10)
    """
    return classifier(
        "xception", keras.applications.Xception, input_shape, num_classes,
        scale=scale, weights=weights, dtype_policy=dtype_policy,
    )  # fmt: skip
