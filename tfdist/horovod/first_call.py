"""Builds a model without an input shape from its first batch, before the first step.

Horovod broadcasts after the first step, for which every rank uses its own initial weights. Here the
weights are created and broadcast before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import UnsupportedModelError
from tfdist.model_setup.build import root_cause
from tfdist.upstream.keras_model import build_for_training, flatten_layers


def is_built(model: keras.Model) -> bool:
    """Returns whether all layers have created their weights."""
    return all(layer.built for layer in flatten_layers(model))


def before_first_call(model: keras.Model, function: Callable[[], None]) -> None:
    """Makes `fit` build the model from its first batch, and call a function before the first step.

    Args:
        model: A model within `fit`, which has created its `train_function`.
        function: Called once, after the model is built.

    Raises:
        UnsupportedModelError: In the first step, if the model cannot be built.
    """
    train_function = model.train_function

    def first(iterator: Any) -> Any:
        model.train_function = train_function
        try:
            build_for_training(model, iterator.element_spec)
        except Exception as error:
            raise UnsupportedModelError(
                "The model has no weights to broadcast, and cannot be built from the data's shapes "
                f"({root_cause(error)}). Add a keras.Input, or call the model once on a batch."
            ) from error
        function()
        return train_function(iterator)

    model.train_function = first
