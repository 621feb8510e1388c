"""Redirects `fit`, `evaluate` and `predict` of every Keras model to a tfdist Trainer."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

import tfdist
from tfdist.model_setup import create

METHODS = ("fit", "evaluate", "predict")


class _MixedIn(type):
    """Accepts Keras's trainer mixed into a layer, as in Keras's tests; tfdist needs no more."""

    def __instancecheck__(cls, model: Any) -> bool:
        return isinstance(model, TensorFlowTrainer)


class _AnyModel(metaclass=_MixedIn):
    """Replaces `keras.Model` in the Trainer's type checks."""


class Redirect:
    """A context in which each model trains with its own cached Trainer.

    Attributes:
        calls: Number of redirected calls so far.
    """

    def __init__(self, strategy: str, num_replicas: int) -> None:
        self._options = {"strategy": strategy, "devices": num_replicas}
        self._trainers: weakref.WeakKeyDictionary[Any, tfdist.Trainer] = weakref.WeakKeyDictionary()
        self.calls = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Replaces the methods inside the context."""
        known_models = types.SimpleNamespace(**vars(keras) | {"Model": _AnyModel})
        methods = {name: self._method(name) for name in METHODS}
        with (
            mock.patch.object(create, "keras", known_models),
            mock.patch.multiple(TensorFlowTrainer, **methods),
        ):
            yield

    def _method(self, name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(TensorFlowTrainer, name))
        def call(model: Any, *arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return getattr(self._trainer(model), name)(*arguments, **options)

        return call

    def _trainer(self, model: Any) -> tfdist.Trainer:
        if model not in self._trainers:
            self._trainers[model] = tfdist.Trainer(lambda: model, **self._options)
        return self._trainers[model]
