"""Model builders: functions that return a new, uncompiled `keras.Model` and keep nothing.

They return logits (the autoencoder pixels), and take the precision as a Keras dtype policy, so that
models of different precision live in one process. Without one the layers follow Keras's global
policy. What they build is of Keras's own layers: it saves, and loads without tfdist.

Naming this package imports no TensorFlow: a command line can list the models at once.
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

    from tfdist.models.builders.alexnet import alexnet as alexnet
    from tfdist.models.builders.autoencoder import autoencoder as autoencoder
    from tfdist.models.builders.cnn import cnn as cnn
    from tfdist.models.builders.densenet import densenet169 as densenet169
    from tfdist.models.builders.gpt import gpt as gpt
    from tfdist.models.builders.keras_application import keras_application as keras_application
    from tfdist.models.builders.lstm import lstm as lstm
    from tfdist.models.builders.mlp import mlp as mlp
    from tfdist.models.builders.resnet import resnet18 as resnet18
    from tfdist.models.builders.resnet50 import resnet50 as resnet50
    from tfdist.models.builders.unet import unet as unet
    from tfdist.models.builders.vgg import vgg16 as vgg16
    from tfdist.models.builders.vit import vit as vit
    from tfdist.models.builders.xception import xception as xception

#: Of `(input_shape, num_classes, *, scale=None, ...)`, by name: the module of the function.
IMAGE_CLASSIFIERS = {
    "cnn": "tfdist.models.builders.cnn",
    "mlp": "tfdist.models.builders.mlp",
    "alexnet": "tfdist.models.builders.alexnet",
    "vgg16": "tfdist.models.builders.vgg",
    "resnet18": "tfdist.models.builders.resnet",
    "resnet50": "tfdist.models.builders.resnet50",
    "densenet169": "tfdist.models.builders.densenet",
    "xception": "tfdist.models.builders.xception",
    "vit": "tfdist.models.builders.vit",
    "keras_application": "tfdist.models.builders.keras_application",
}

#: All of them. The others take what their docstrings say.
MODELS = IMAGE_CLASSIFIERS | {
    "autoencoder": "tfdist.models.builders.autoencoder",
    "gpt": "tfdist.models.builders.gpt",
    "lstm": "tfdist.models.builders.lstm",
    "unet": "tfdist.models.builders.unet",
}

#: Arguments of builders that no user sets: the data and the precision say them.
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

    Args:
        name: Of the model, as in `config.model`.
        input_shape: Of one image: height, width, channels.
        num_classes: Number of logits.
        settings: Arguments of the builder by name, as in `config.set`; what it does not take is
            the recipe's own and left aside.
        scale: Multiplies the images on their device, for those that arrive as uint8.

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
    own = {key: value for key, value in settings.items() if key in options(name)}
    return _builder(name)(input_shape, num_classes, scale=scale, **own)


def options(name: str) -> dict[str, tuple[Any, Any]]:
    """Returns what can be set of a model: of each keyword argument its type and its default.

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
