"""Honors overrides of `fit`, `evaluate` and `predict` in a model subclass.

KerasHub's tasks preprocess strings in these methods, and other models add callbacks. A trainer
calls the override, and replaces the method of `keras.Model` that the override calls with `super()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import keras

from tfdist.upstream.keras_model import overrides
from tfdist.upstream.keras_training import WITHIN_FIT
from tfdist.upstream.patching import replaced

Method = TypeVar("Method", bound=Callable[..., Any])

_CALLER = "_override_that_calls"  # attribute of a trainer


def honor_overrides(method: Method) -> Method:
    """Wraps a method of a trainer so that it runs the override of the model's class, if any."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not overrides(self.model, name) or vars(self).pop(_CALLER, None) == name:
            return method(self, *args, **options)
        keras_method = getattr(keras.Model, name)
        given = args, {key: value for key, value in options.items() if key != WITHIN_FIT}

        def replacement(model: keras.Model, *args: Any, **options: Any) -> Any:
            if model is not self.model:
                return keras_method(model, *args, **options)
            if options.pop(WITHIN_FIT, False):  # Keras ignores the data that the override passes
                args, options = given
            with replaced(keras.Model, name, keras_method):  # callbacks see a plain model
                return method(self, *args, **options)

        with replaced(keras.Model, name, replacement):
            return getattr(self.model, name)(*args, **options)

    return cast(Method, call)


def note_override(trainer: Any, name: str) -> None:
    """Makes the next call of a trainer's method run it, and not the override of the model's class.

    For a method that replaces the one of `keras.Model`: an override has already run and called it.
    """
    vars(trainer)[_CALLER] = name
