"""What the models with custom steps have in common: rows, and noise that can be turned off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

_RANDOM = np.random.default_rng(4)
ROWS = _RANDOM.normal(size=(12, 6)).astype("float32")
IMAGES = np.tanh(_RANDOM.normal(size=(12, 4, 4, 1))).astype("float32")


class Noisy(keras.Model):
    """A model whose noise, with its draws switched off, follows from the rows."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.seeds = keras.random.SeedGenerator(5)

    def noise(self, x: Any) -> Any:
        """Numbers of the shape of `x`."""
        if self.draws:
            return keras.random.normal(ops.shape(x), seed=self.seeds)
        return ops.sin(3.0 * ops.stop_gradient(x))

    def ready(self) -> keras.Model:
        """Compiles the model as it is to be trained."""
        self.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.5), loss="mse")
        return self


@dataclasses.dataclass(frozen=True)
class Own:
    """A model with a step of its own.

    Attributes:
        build: Returns it compiled; takes whether it draws.
        x: Its rows.
        whole: A part of why it is computed on whole batches; None: it is not.
    """

    build: Callable[[bool], keras.Model]
    x: np.ndarray
    whole: str | None


MODELS: dict[str, Own] = {}


def model(image: bool = False, whole: str | None = None) -> Callable[[type], type]:
    """Makes a class one of `MODELS`."""

    def register(cls: type) -> type:
        def build(draws: bool) -> keras.Model:
            keras.utils.set_random_seed(1)
            return cls(draws).ready()

        MODELS[cls.__name__] = Own(build, IMAGES if image else ROWS, whole)
        return cls

    return register


def dense(units: int, activation: str | None = None) -> layers.Layer:
    """A dense layer."""
    return layers.Dense(units, activation=activation)


def labels_of(x: Any) -> Any:
    """A class for each row, that can be learnt."""
    return ops.argmax(x[:, :3], axis=1)
