"""Values that layers and losses assign to variables, and read again, are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.programs.engines import assert_equals_one_device
from tests.programs.program import unregistered
from tests.programs.rows import normal
from tests.support.case import compiled
from tests.support.data import Data


class Centered(layers.Layer):
    """Subtracts a moving mean that it has just updated."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(
            name="mean", shape=shape[1:], initializer="zeros", trainable=False
        )

    def call(self, inputs: Any) -> Any:
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs, axis=0))
        return inputs - self.mean


class CenteredLoss(keras.losses.Loss):
    """Compares outputs with a moving mean that it has just updated."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = keras.Variable(np.zeros(3), trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(y_pred, axis=0))
        return ops.mean((y_true - y_pred - self.mean) ** 2, axis=-1)


class Model(keras.Model):
    """Updates a moving mean and metrics in `compute_loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)
        self.mean = self.add_weight(name="mean", shape=(3,), initializer="zeros", trainable=False)
        self.total, self.last = keras.metrics.Sum(name="total"), Last(name="last")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any) -> Any:
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(y_pred, axis=0))
        loss = ops.mean((y - y_pred - self.mean) ** 2)
        self.total.update_state(loss)
        self.last.update_state(loss)
        return loss


class Last(keras.metrics.Metric):
    """The sum over the last batch, by additions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sum = self.add_variable((), "zeros")

    def update_state(self, values: Any, *_: Any, sample_weight: Any = None) -> None:
        self.sum.assign_add(ops.sum(ops.cast(values, self.sum.dtype)) - self.sum)

    def result(self) -> Any:
        return self.sum + 0.0


def sequential(*hidden: layers.Layer, **options: Any) -> keras.Model:
    return compiled(keras.Sequential([keras.Input((4,)), layers.Dense(3), *hidden]), **options)


MODELS: dict[str, Callable[[], keras.Model]] = {
    "layer": lambda: sequential(Centered()),
    "loss": lambda: sequential(loss=CenteredLoss()),
    "compute_loss": lambda: compiled(Model(), loss=None),
    "metric": lambda: sequential(metrics=[Last(name="last")]),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_one_device(name: str) -> None:
    data = Data(normal(4), normal(3, seed=2))
    assert_equals_one_device(unregistered(MODELS[name], data, epochs=1), eagerly=True)
