"""Cases of weighted rows: sample weights, class weights, masks."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from tests.support.case import case, compiled, mlp
from tests.support.data import Data, classes, points, tokens


@case(points(weighted=True))
def sample_weight() -> keras.Model:
    """Sample weights."""
    return compiled(mlp(), weighted_metrics=["mae"])


@case(classes(), fit={"class_weight": {0: 0.2, 1: 1.0, 2: 3.0}})
def class_weight() -> keras.Model:
    """Class weights."""
    model = mlp(outputs=3, activation="softmax")
    loss = "sparse_categorical_crossentropy"
    return compiled(model, loss=loss, weighted_metrics=["accuracy"])


def _tagger(outputs: int = 1) -> keras.Model:
    """Returns a model with one output per token, masked at padding."""
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 2, mask_zero=True),
            layers.SimpleRNN(2, return_sequences=True),
            layers.Dense(outputs),
        ]
    )


@case(tokens(labels="step"))
def masked_steps() -> keras.Model:
    """A masked loss per time step (`mask_zero`, a recurrent layer)."""
    return compiled(_tagger(), metrics=["mae"])


@case(tokens(labels="step", weighted=True))
def masked_weighted_steps() -> keras.Model:
    """A masked loss with a sample weight per time step."""
    return compiled(_tagger(), weighted_metrics=["mae"])


@case(tokens(labels="step", weighted=True))
def masked_mean_with_sample_weight() -> keras.Model:
    """A masked loss divided by the sum of weights that the mask leaves."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return compiled(_tagger(), loss=loss)


@case(tokens(labels="step"), batch_size=6)
def masked_sum() -> keras.Model:
    """A masked loss that is summed."""
    loss = keras.losses.MeanSquaredError(reduction="sum")
    return compiled(_tagger(), keras.optimizers.SGD(0.02), loss)


@case(tokens(empty=()))
def masked_pooling() -> keras.Model:
    """A mask that a pooling layer consumes."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 3, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    return compiled(model, metrics=["mae"])


@case(tokens(labels="step", weighted=True))
def steps_weighted() -> keras.Model:
    """A sample weight per time step, without a mask."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 2),
            layers.Conv1D(2, 3, padding="same", activation="tanh"),
            layers.Dense(1),
        ]
    )
    return compiled(model)


@case(tokens(labels="class"))
def ignore_class() -> keras.Model:
    """Labels that the loss ignores (`ignore_class`)."""
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(7, 2), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    return compiled(model, loss=loss)


@case(Data(points().x, points().y, np.eye(15, dtype="float32")[[5, 12, 14]].sum(axis=0)))
def weights_of_zero() -> keras.Model:
    """Sample weights that are 0 except for one row of each batch, divided by their sum."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return compiled(mlp(), loss=loss, weighted_metrics=["mae"])


@case(tokens())
def lstm() -> keras.Model:
    """An LSTM with masked steps and fully masked rows."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 2, mask_zero=True),
            layers.LSTM(2),
            layers.Dense(1),
        ]
    )
    return compiled(model)
