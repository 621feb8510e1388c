"""Models whose class overrides `fit`, `evaluate` or `predict`, and goes on by `super()`.

KerasHub's tasks preprocess strings there, others add a callback. A trainer calls the override as
Keras's users do, and takes the place of what it overrides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import keras

from tfdist.upstream.patching import replaced

Method = TypeVar("Method", bound=Callable[..., Any])


def overrides(model: keras.Model, name: str) -> bool:
    """Tells whether the class of a model has a method of its own instead of Keras's."""
    return getattr(type(model), name) is not getattr(keras.Model, name)


def through_the_model(method: Method) -> Method:
    """A method of a trainer that goes through the override that the model's class has of it."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not overrides(self.model, name):
            return method(self, *args, **options)
        of_keras = getattr(keras.Model, name)

        def instead(model: keras.Model, *args: Any, **options: Any) -> Any:
            if model is not self.model:
                return of_keras(model, *args, **options)
            with replaced(keras.Model, name, of_keras):  # for callbacks, a plain model again
                return method(self, *args, **options)

        with replaced(keras.Model, name, instead):
            return getattr(self.model, name)(*args, **options)

    return cast(Method, call)
