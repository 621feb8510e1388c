"""Model builders: functions that return a new, uncompiled `keras.Model`.

They return logits (the autoencoder: pixels), and take a Keras dtype policy, so that models of
different precision can be used in one process. Without a policy, layers follow Keras's global one.
Models consist of Keras's layers only, so that saved models load without tfdist.

Importing this package does not import TensorFlow, so that a command line can list the models.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tfdist.errors import ConfigurationError, did_you_mean

if TYPE_CHECKING:
    import keras

    from tfdist.models.builders.applications import densenet169 as densenet169
    from tfdist.models.builders.applications import keras_application as keras_application
    from tfdist.models.builders.applications import resnet50 as resnet50
    from tfdist.models.builders.applications import vgg16 as vgg16
    from tfdist.models.builders.applications import xception as xception
    from tfdist.models.builders.cnn import alexnet as alexnet
    from tfdist.models.builders.cnn import cnn as cnn
    from tfdist.models.builders.gpt import gpt as gpt
    from tfdist.models.builders.lstm import lstm as lstm
    from tfdist.models.builders.mlp import mlp as mlp
    from tfdist.models.builders.resnet import resnet18 as resnet18
    from tfdist.models.builders.unet import autoencoder as autoencoder
    from tfdist.models.builders.unet import unet as unet
    from tfdist.models.builders.vit import vit as vit

#: Modules of the builders with the signature `(input_shape, num_classes, *, scale=None, ...)`.
IMAGE_CLASSIFIERS = {
    "cnn": "tfdist.models.builders.cnn",
    "mlp": "tfdist.models.builders.mlp",
    "alexnet": "tfdist.models.builders.cnn",
    "vgg16": "tfdist.models.builders.applications",
    "resnet18": "tfdist.models.builders.resnet",
    "resnet50": "tfdist.models.builders.applications",
    "densenet169": "tfdist.models.builders.applications",
    "xception": "tfdist.models.builders.applications",
    "vit": "tfdist.models.builders.vit",
    "keras_application": "tfdist.models.builders.applications",
}

#: Modules of all builders. The additional ones have other arguments; see their docstrings.
MODELS = IMAGE_CLASSIFIERS | {
    "autoencoder": "tfdist.models.builders.unet",
    "gpt": "tfdist.models.builders.gpt",
    "lstm": "tfdist.models.builders.lstm",
    "unet": "tfdist.models.builders.unet",
}

#: Arguments of builders that follow from the data and the precision, so that users do not set them.
_SAID_ELSEWHERE = ("scale", "dtype_policy")

__all__ = ["IMAGE_CLASSIFIERS", "MODELS", "image_classifier", "options", *MODELS]


def image_classifier(
    name: str | None,
    input_shape: tuple[int, int, int],
    num_classes: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    scale: float | None = None,
) -> keras.Model:
    """Builds one of `IMAGE_CLASSIFIERS` by its name.

    Example:
        >>> from tfdist import models
        >>> models.image_classifier("cnn", (32, 32, 3), 10, {"filters": (8, 16)}).output_shape
        (None, 10)

    Args:
        name: Name of the model, as in `--model`.
        input_shape: Height, width and channels of an image.
        num_classes: Number of logits.
        settings: Arguments of the builder by name, as in `--set`. Names that it does not have are
            ignored: they are settings of the recipe.
        scale: Factor by which images are multiplied on the device, for images that arrive as uint8.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.

    Raises:
        ConfigurationError: The model does not classify images.
    """
    if name not in IMAGE_CLASSIFIERS:
        raise ConfigurationError(
            f"--model {name}: expected one that classifies images: {', '.join(IMAGE_CLASSIFIERS)}."
            f"{did_you_mean(name, IMAGE_CLASSIFIERS)}"
        )
    arguments = {key: value for key, value in settings.items() if key in options(name)}
    return _builder(name)(input_shape, num_classes, scale=scale, **arguments)


def options(name: str) -> dict[str, tuple[Any, Any]]:
    """Returns the type and the default of each keyword argument of a model.

    Example:
        >>> from tfdist import models
        >>> models.options("mlp")["dropout"]
        (<class 'float'>, 0.0)

    Args:
        name: One of `MODELS`.
    """
    builder = _builder(name)
    types = typing.get_type_hints(builder)
    return {
        key: (types[key], parameter.default)
        for key, parameter in inspect.signature(builder).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and key not in _SAID_ELSEWHERE
    }


def _builder(name: str) -> Any:
    return getattr(importlib.import_module(MODELS[name]), name)


def __getattr__(name: str) -> Any:
    """Loads a builder on its first use (PEP 562)."""
    if name in MODELS:
        globals()[name] = builder = _builder(name)
        return builder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
