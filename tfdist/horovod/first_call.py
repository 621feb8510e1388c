"""A model without an input has no weights yet: it is built from the shapes of its first batch.

Horovod broadcasts after the first step, which every rank then made from weights of its own. Here
the weights are there, and those of one rank, before the step is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import UnsupportedModelError
from tfdist.model_setup.build import root_cause
from tfdist.upstream.keras_model import build_for_training, flatten_layers


def is_built(model: keras.Model) -> bool:
    """Tells whether all weights are there."""
    return all(layer.built for layer in flatten_layers(model))


def before_first_call(model: keras.Model, function: Callable[[], None]) -> None:
    """Builds a model in `fit`, from the first batch that it is about to step on, then calls back.

    Args:
        model: Its `fit` has made its `train_function`.
        function: Called once, between the building and the step.
    """
    train_function = model.train_function

    def first(iterator: Any) -> Any:
        model.train_function = train_function
        try:
            build_for_training(model, iterator.element_spec)
        except Exception as error:
            raise UnsupportedModelError(
                "The model has no weights to broadcast, and cannot be built from the data's shapes "
                f"({root_cause(error)}): give it a keras.Input, or call it once on a batch."
            ) from error
        function()
        return train_function(iterator)

    model.train_function = first
