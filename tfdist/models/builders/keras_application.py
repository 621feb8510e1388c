"""Any network of `keras.applications`, with a new classification layer."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import keras
from keras import layers

from tfdist.errors import ConfigurationError, did_you_mean
from tfdist.models.builders import head
from tfdist.models.builders.application import Weights, loaded
from tfdist.precision import policy

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
    make = _function(application)
    inputs = keras.Input(input_shape)
    with policy(dtype_policy):  # the functions of keras.applications take no dtype
        x = inputs if scale in (None, 1 / 255) else layers.Rescaling(255 * scale)(inputs)
        x = _preprocessed(x, make)
        with loaded(application, weights) as start:
            backbone = make(input_tensor=x, include_top=False, pooling="avg", weights=start)
        x = layers.Dropout(dropout)(backbone.output) if dropout else backbone.output
        logits = head.logits(x, num_classes, dtype_policy)
    return keras.Model(inputs, logits, name="keras_application")


def _function(name: str) -> Any:
    """Returns the function of `keras.applications` with this name.

    Raises:
        ConfigurationError: There is none.
    """
    known = [n for n, f in vars(keras.applications).items() if inspect.isfunction(f)]
    if name not in known:
        raise ConfigurationError(
            f"application={name}: keras.applications has no such network; choose one of "
            f"{', '.join(sorted(known))}.{did_you_mean(name, known)}"
        )
    return getattr(keras.applications, name)


def _preprocessed(x: keras.KerasTensor, make: Any) -> keras.KerasTensor:
    """Applies the `preprocess_input` of a network as a layer, to pixels from 0 to 255.

    Networks that include their preprocessing get the pixels unchanged.
    """
    mode = _mode(importlib.import_module(make.__module__))
    if mode == "tf":
        return layers.Rescaling(1 / 127.5, offset=-1.0)(x)
    if mode == "torch" and x.shape[-1] == 3:
        return layers.Normalization(mean=_TORCH_MEAN, variance=_TORCH_VARIANCE)(x)
    if mode == "caffe" and x.shape[-1] == 3:
        x = keras.ops.flip(x, axis=-1)  # BGR
        return layers.Rescaling(1.0, offset=[-103.939, -116.779, -123.68])(x)
    return x


def _mode(module: ModuleType) -> str:
    """Returns the `mode` that a module's `preprocess_input` uses; empty if it changes nothing."""
    import numpy as np

    black = np.zeros((1, 1, 1, 3), "float32")
    first = float(module.preprocess_input(black, data_format="channels_last").flat[0])
    return {-1.0: "tf", 0.0: "", -103.939: "caffe"}.get(round(first, 3), "torch")
