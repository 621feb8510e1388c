"""Programs for time series."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import program
from tests.programs.rows import integers, normal, sequences
from tests.programs.vision import encoder, of_classes
from tests.support.case import compiled
from tests.support.data import Data


def forecast(inputs: Any, x: Any, optimizer: Any = "adam") -> keras.Model:
    """Returns a model that predicts one number from features [rows, n]."""
    return compiled(keras.Model(inputs, layers.Dense(1)(x)), optimizer, "mse", metrics=["mae"])


@program(sequences(), quick=True)
def weather_by_lstm() -> keras.Model:
    """Forecasting with an LSTM."""
    inputs = keras.Input((6, 2))
    return forecast(inputs, layers.LSTM(3)(inputs), keras.optimizers.Adam(1e-2))


@program(sequences())
def stacked_grus() -> keras.Model:
    """Stacked GRUs with recurrent regularizers, one of them backwards."""
    inputs = keras.Input((6, 2))
    x = layers.GRU(3, return_sequences=True, recurrent_regularizer="l2")(inputs)
    return forecast(inputs, layers.GRU(2, go_backwards=True, reset_after=False)(x))


@program(Data(normal(8, 2), normal(8, 2)))
def anomalies() -> keras.Model:
    """An autoencoder of 1D convolutions and transposed convolutions."""
    inputs = keras.Input((8, 2))
    x = layers.Conv1D(3, 3, strides=2, padding="same", activation="relu")(inputs)
    x = layers.Conv1DTranspose(2, 3, strides=2, padding="same")(layers.SpatialDropout1D(0.0)(x))
    return compiled(keras.Model(inputs, x), "adam", "mse")


@program(sequences(8))
def causal_dilated_convolutions() -> keras.Model:
    """A temporal convolutional network: causal, dilated, with residuals."""
    inputs = keras.Input((8, 2))
    x = layers.Conv1D(3, 1)(inputs)
    for dilation in (1, 2, 4):
        y = layers.Conv1D(3, 2, dilation_rate=dilation, padding="causal", activation="relu")(x)
        x = layers.LayerNormalization()(x + y)
    return forecast(inputs, x[:, -1])


@program(Data(normal(8, 1), integers(3)), sync_batch_norm=True, quick=True)
def classified_by_convolutions() -> keras.Model:
    """A time series classifier: convolutions with `sync_batch_norm`."""
    x = inputs = keras.Input((8, 1))
    for _ in range(2):
        x = layers.Conv1D(3, 3, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    loss = "sparse_categorical_crossentropy"
    return compiled(keras.Model(inputs, x), "adam", loss, metrics=["accuracy"])


@program(Data(normal(6, 4), integers(3)))
def classified_by_transformer() -> keras.Model:
    """A time series classifier: a transformer, pooled over channels."""
    inputs = keras.Input((6, 4))
    x = layers.GlobalAveragePooling1D(data_format="channels_first")(encoder(inputs))
    return compiled(keras.Model(inputs, layers.Dense(3)(x)), "adam", of_classes())


class Roads(layers.Layer):
    """Averages over neighbors in a graph of roads, then applies an LSTM to each road."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = layers.LSTM(3), layers.Dense(1)
        self.mix = layers.Dense(2, activation="relu")
        self.roads = np.array([[0.5, 0.5, 0], [0.25, 0.5, 0.25], [0, 0.5, 0.5]])

    def call(self, x: Any) -> Any:
        x = self.mix(ops.einsum("ij,btjf->btif", ops.cast(self.roads, x.dtype), x))
        rows, steps = ops.shape(x)[0], x.shape[1]
        x = ops.reshape(ops.transpose(x, (0, 2, 1, 3)), (-1, steps, 2))
        return ops.reshape(self.out(self.lstm(x)), (rows, 3))


@program(Data(normal(4, 3, 2), normal(3, seed=5)))
def traffic() -> keras.Model:
    """Traffic forecasting on a graph, with rows and roads merged into one axis."""
    inputs = keras.Input((4, 3, 2))
    return compiled(keras.Model(inputs, Roads()(inputs)), keras.optimizers.RMSprop(1e-2))


@program(Data(normal(4, 2)[:10], normal(1, seed=2)[:10]), batch_size=5, may_refuse=True, epochs=1)
def stateful_lstm() -> keras.Model:
    """A stateful LSTM."""
    inputs = keras.Input(batch_shape=(5, 4, 2))
    return forecast(inputs, layers.LSTM(3, stateful=True)(inputs))


@program(sequences(), feed="unknown length", fit={"validation_data": (normal(6, 2), normal(1))})
def windows_from_a_stream() -> keras.Model:
    """Windows from a stream of unknown length, with validation."""
    inputs = keras.Input((6, 2))
    return forecast(inputs, layers.SimpleRNN(3)(inputs), keras.optimizers.Adam(1e-2))


@program(Data(normal(5, 2), normal(5, 1, seed=4)), quick=True)
def gaps_masked() -> keras.Model:
    """Masked time steps with an output per step."""
    inputs = keras.Input((5, 2))
    x = layers.Masking(0.0)(layers.ReLU()(inputs))
    x = layers.TimeDistributed(layers.Dense(3))(layers.GRU(3, return_sequences=True)(x))
    return compiled(keras.Model(inputs, layers.Dense(1)(x)), "adam", "mse", metrics=["mae"])


@program(sequences())
def attention_over_steps() -> keras.Model:
    """Luong's and Bahdanau's attention over the steps of an LSTM."""
    inputs = keras.Input((6, 2))
    steps = layers.LSTM(3, return_sequences=True)(inputs)
    one = layers.Attention(use_scale=True)([steps, steps])
    other = layers.AdditiveAttention()([steps, steps])
    pooled = [layers.GlobalAveragePooling1D()(x) for x in (one, other)]
    return forecast(inputs, layers.Average()(pooled))
