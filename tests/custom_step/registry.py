"""Registry of the models with custom steps, and their data and base class."""

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
    """A model whose noise is random, or a deterministic function of its rows."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.seeds = keras.random.SeedGenerator(5)

    def noise(self, x: Any) -> Any:
        """Returns noise of the shape of `x`."""
        if self.draws:
            return keras.random.normal(ops.shape(x), seed=self.seeds)
        return ops.sin(3.0 * ops.stop_gradient(x))

    def ready(self) -> keras.Model:
        """Compiles the model for training."""
        self.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.5), loss="mse")
        return self


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A model with a custom `train_step`.

    Attributes:
        build: Returns the compiled model. Its argument selects random noise.
        x: Rows to train on.
        full_batch: Part of the expected warning if the step runs in full-batch mode; otherwise
            None.
    """

    build: Callable[[bool], keras.Model]
    x: np.ndarray
    full_batch: str | None


MODELS: dict[str, ModelSpec] = {}


def model(image: bool = False, full_batch: str | None = None) -> Callable[[type], type]:
    """Registers a class in `MODELS`."""

    def register(cls: type) -> type:
        def build(draws: bool) -> keras.Model:
            keras.utils.set_random_seed(1)
            return cls(draws).ready()

        MODELS[cls.__name__] = ModelSpec(build, IMAGES if image else ROWS, full_batch)
        return cls

    return register


def dense(units: int, activation: str | None = None) -> layers.Layer:
    """Returns a dense layer."""
    return layers.Dense(units, activation=activation)


def labels_of(x: Any) -> Any:
    """Returns a learnable class label for each row."""
    return ops.argmax(x[:, :3], axis=1)
