"""Cases of data: uneven batches, structures of inputs, and datasets of every kind."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.support.case import case, compiled, mlp
from tests.support.data import Data, classes, images, points


@case(points())
def uneven_batches() -> keras.Model:
    """Batches that do not divide by the replicas, and a last one of a single row."""
    return compiled(mlp(), metrics=["mae"])


@case(points(13), batch_size=4, evaluate={"batch_size": 5})
def small_batches() -> keras.Model:
    """Batches of 4 rows, evaluated in batches of 5."""
    return compiled(mlp(), metrics=["mae"])


@case(images())
def convolution() -> keras.Model:
    """A convolutional classifier on images."""
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(2, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(model, loss=loss, metrics=["accuracy"])


@case(Data([points().x, 2 * points().x[:, :2]], points().y))
def list_of_inputs() -> keras.Model:
    """Several inputs as a list."""
    inputs = [keras.Input((4,)), keras.Input((2,))]
    hidden = layers.Concatenate()([layers.Dense(2)(inputs[0]), inputs[1]])
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.Activation("tanh")(hidden))))


@case(Data({"left": points().x, "right": np.arange(15) % 4}, points().y), feed="dataset")
def dict_of_inputs() -> keras.Model:
    """Several inputs as a dictionary, one of integers."""
    inputs = {"left": keras.Input((4,), name="left"), "right": keras.Input((), name="right")}
    right = layers.CategoryEncoding(4, output_mode="one_hot")(layers.Reshape((1,))(inputs["right"]))
    hidden = layers.Concatenate()([layers.Dense(2, activation="tanh")(inputs["left"]), right])
    return compiled(keras.Model(inputs, layers.Dense(1)(hidden)))


class Unbuilt(keras.Model):
    """A subclassed model whose weights are created on the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(3, activation="tanh")
        self.head = layers.Dense(1)

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return self.head(self.hidden(inputs))


WORDS = np.array(["red", "green", "blue"])


@case(Data(WORDS[classes().y][:, None], points().y), feed="dataset")
def strings() -> keras.Model:
    """Strings that the model looks up."""
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="string"),
            layers.StringLookup(vocabulary=WORDS, output_mode="one_hot"),
            layers.Dense(3, activation="tanh"),
            layers.Dense(1),
        ]
    )
    return compiled(model)


@case(points())
def sequential_unbuilt() -> keras.Model:
    """A `Sequential` without an input shape."""
    model = keras.Sequential([layers.Dense(3, activation="tanh"), layers.Dense(1)])
    return compiled(model, metrics=["mae"])


@case(points())
def subclassed_unbuilt() -> keras.Model:
    """A subclassed model that is built from the data."""
    return compiled(Unbuilt(), metrics=["mae"])


@case(points(weighted=True), feed="dataset")
def dataset() -> keras.Model:
    """A `tf.data.Dataset` with sample weights."""
    return compiled(mlp(), weighted_metrics=["mae"])


@case(points(), feed="unknown length")
def unknown_length() -> keras.Model:
    """A dataset of unknown length, whose steps are counted exactly."""
    decay = keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.8)
    return compiled(mlp(), keras.optimizers.SGD(decay), metrics=["mae"])


@case(points(), feed="generator", fit={"steps_per_epoch": 3}, evaluate={"steps": 3})
def generator() -> keras.Model:
    """A Python generator."""
    return compiled(mlp(), metrics=["mae"])


@case(points(), feed="pydataset")
def pydataset() -> keras.Model:
    """A `keras.utils.PyDataset`."""
    return compiled(mlp(), metrics=["mae"])


# ---- rows ----


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
