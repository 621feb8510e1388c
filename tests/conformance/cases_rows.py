"""Cases of models whose rows depend on each other, and of inputs that are not rows."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.support.case import case, compiled
from tests.support.data import points


class Centred(layers.Layer):
    """Subtracts the batch's mean."""

    def call(self, inputs: Any) -> Any:
        return inputs - ops.mean(inputs, axis=0)


@case(points())
def rows_that_mix() -> keras.Model:
    """A layer that subtracts the batch's mean, with BatchNorm (full batches)."""
    hidden = [layers.Dense(6, activation="tanh"), Centred()]
    model = [keras.Input((4,)), *hidden, layers.BatchNormalization(), layers.Dense(1)]
    adam = keras.optimizers.Adam(0.02, epsilon=1e-2)
    return compiled(keras.Sequential(model), adam, metrics=["mae"])
