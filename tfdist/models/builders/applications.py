"""Networks of `keras.applications` as classifiers: four as published, and any other one.

Sources: Simonyan and Zisserman 2015, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", configuration D; He et al. 2016, "Deep Residual Learning for Image Recognition", table
1; Huang et al. 2017, "Densely Connected Convolutional Networks", table 1; Chollet 2017, "Xception:
Deep Learning with Depthwise Separable Convolutions".
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
from keras import layers

from tfdist.errors import ConfigurationError, did_you_mean, first_line
from tfdist.models.builders import head
from tfdist.models.builders.head import pixels
from tfdist.precision import policy

#: Initial weights: random (None or "none"), trained on ImageNet ("imagenet", downloaded once), or
#: the path of a weights file.
Weights = str | None


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
    """Builds a network of `keras.applications` with a new output layer.

    Args:
        name: Name of the model.
        make: A function of `keras.applications`.
        input_shape: Shape of one image: height, width, channels.
        num_classes: Number of logits.
        scale: Factor for the pixels, applied on the device.
        weights: Initial weights of the network. The last layer always starts from random weights.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.
        features: Name of the layer whose output the last layer reads; None: the average over the
            image of the network's output without its top.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.

    Raises:
        ConfigurationError: The weights cannot be downloaded or read.
    """
    with policy(dtype_policy), loaded(name, weights) as start:  # Keras's functions take no dtype
        top: dict[str, Any] = {"include_top": False, "pooling": "avg"}
        if features:  # layers after `features` are left out
            top = {"include_top": True, "classes": 1000 if start else 1}
        inputs, x = pixels(input_shape, scale, dtype_policy)
        network = make(input_tensor=x, weights=start, **top)
        x = network.get_layer(features).output if features else network.output
        return keras.Model(inputs, head.logits(x, num_classes, dtype_policy), name=name)


@contextmanager
def loaded(name: str, weights: Weights) -> Iterator[Weights]:
    """Returns the `weights` argument for a function of `keras.applications`.

    Raises:
        ConfigurationError: The block failed to download or read the weights.
    """
    if weights in (None, "none"):
        yield None
        return
    if weights != "imagenet" and not Path(weights).is_file():
        raise ConfigurationError(
            f"weights={weights}: the file does not exist. Pass the path of a weights file, "
            "imagenet, or none for random weights (--set weights=none)."
        )
    try:
        yield weights
    except Exception as error:
        reason = first_line(error)
        failed_download = re.match(r"URL fetch failure on (\S+):", reason)
        if failed_download is None:
            problem = f"weights={weights}: cannot be loaded into {name}: {reason}"
        else:
            url = failed_download[1]
            home = os.environ.get("KERAS_HOME", "~/.keras")
            problem = (
                f"weights={weights}: {url} cannot be downloaded. Copy this file to {home}/models/ "
                "by other means, or start from random weights (--set weights=none)."
            )
        raise ConfigurationError(problem) from error


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


#: Preprocessing of `keras.applications.imagenet_utils.preprocess_input(mode="torch")`.
_TORCH_MEAN = [255 * x for x in (0.485, 0.456, 0.406)]
_TORCH_VARIANCE = [(255 * x) ** 2 for x in (0.229, 0.224, 0.225)]


def keras_application(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    application: str = "EfficientNetV2B0",
    weights: Weights = None,
    dropout: float = 0.2,
    scale: float | None = None,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds a network of `keras.applications` with global average pooling and a dense layer.

    The preprocessing that the network's weights were trained with is part of the model.

    Example:
        >>> from tfdist import models
        >>> models.keras_application((64, 64, 3), 10, application="MobileNetV3Small").output_shape
        (None, 10)

    Args:
        input_shape: Shape of one image: height, width, channels.
        num_classes: Number of logits.
        application: Name of the function in `keras.applications`, such as `"ResNet50V2"`.
        weights: `"imagenet"` downloads pretrained weights once; the path of a weights file without
            the top loads that file; None starts from random weights.
        dropout: Fraction of the averaged features that is dropped in training.
        scale: Factor that maps pixels to 0..1; None: pixels are 0 to 255.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.

    Raises:
        ConfigurationError: There is no such network, or its weights cannot be loaded.
    """
    names = [n for n, f in vars(keras.applications).items() if inspect.isfunction(f)]
    if application not in names:
        raise ConfigurationError(
            f"application={application}: keras.applications has no such network; choose one of "
            f"{', '.join(sorted(names))}.{did_you_mean(application, names)}"
        )
    make = getattr(keras.applications, application)
    inputs = keras.Input(input_shape)
    with policy(dtype_policy):  # the functions of keras.applications take no dtype
        x = inputs if scale in (None, 1 / 255) else layers.Rescaling(255 * scale)(inputs)
        x = _preprocessed(x, make)
        with loaded(application, weights) as start:
            backbone = make(input_tensor=x, include_top=False, pooling="avg", weights=start)
        x = layers.Dropout(dropout)(backbone.output) if dropout else backbone.output
        logits = head.logits(x, num_classes, dtype_policy)
    return keras.Model(inputs, logits, name="keras_application")


def _preprocessed(x: keras.KerasTensor, make: Any) -> keras.KerasTensor:
    """Applies the `preprocess_input` of a network as a layer, to pixels from 0 to 255.

    Networks that include their preprocessing get the pixels unchanged.
    """
    import numpy as np

    # The mode that the module's `preprocess_input` uses; empty if it changes nothing.
    black = np.zeros((1, 1, 1, 3), "float32")
    module = importlib.import_module(make.__module__)
    first = float(module.preprocess_input(black, data_format="channels_last").flat[0])
    mode = {-1.0: "tf", 0.0: "", -103.939: "caffe"}.get(round(first, 3), "torch")
    if mode == "tf":
        return layers.Rescaling(1 / 127.5, offset=-1.0)(x)
    if mode == "torch" and x.shape[-1] == 3:
        return layers.Normalization(mean=_TORCH_MEAN, variance=_TORCH_VARIANCE)(x)
    if mode == "caffe" and x.shape[-1] == 3:
        x = keras.ops.flip(x, axis=-1)  # BGR
        return layers.Rescaling(1.0, offset=[-103.939, -116.779, -123.68])(x)
    return x
