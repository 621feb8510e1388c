"""Sends `fit`, `evaluate` and `predict` of every Keras model through a tfdist Trainer."""

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
    """Keras's tests mix its trainer into a layer, which is all that tfdist asks of a model."""

    def __instancecheck__(cls, model: Any) -> bool:
        return isinstance(model, TensorFlowTrainer)


class _AnyModel(metaclass=_MixedIn):
    """What the Trainer takes for a `keras.Model` meanwhile."""


class Through:
    """While it is entered, models train by Trainers of their own, kept with them.

    Args:
        strategy: one whose replicas share the variables that a model has already.
        num_replicas: how many.

    Attributes:
        calls: of the methods, so far.
    """

    def __init__(self, strategy: str, num_replicas: int) -> None:
        self._options = {"strategy": strategy, "devices": num_replicas}
        self._trainers: weakref.WeakKeyDictionary[Any, tfdist.Trainer] = weakref.WeakKeyDictionary()
        self.calls = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Replaces the methods for as long as the context lasts."""
        known_models = types.SimpleNamespace(**vars(keras) | {"Model": _AnyModel})
        through = {name: self._method(name) for name in METHODS}
        with (
            mock.patch.object(create, "keras", known_models),
            mock.patch.multiple(TensorFlowTrainer, **through),
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
