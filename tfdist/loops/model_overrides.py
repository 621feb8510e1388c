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


def honor_overrides(method: Method) -> Method:
    """Wraps a method of a trainer so that it runs the override of the model's class, if any."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not overrides(self.model, name):
            return method(self, *args, **options)
        keras_method = getattr(keras.Model, name)

        def replacement(model: keras.Model, *args: Any, **options: Any) -> Any:
            if model is not self.model:
                return keras_method(model, *args, **options)
            options.pop(WITHIN_FIT, None)
            with replaced(keras.Model, name, keras_method):  # callbacks see a plain model
                return method(self, *args, **options)

        with replaced(keras.Model, name, replacement):
            return getattr(self.model, name)(*args, **options)

    return cast(Method, call)
