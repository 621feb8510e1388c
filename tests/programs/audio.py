"""Programs for audio."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import program
from tests.programs.rows import integers, normal
from tests.programs.vision import of_classes
from tests.support.case import compiled
from tests.support.data import Data


def _spoken() -> Data:
    return Data(normal(8, 3), integers(4, 3, low=1))


@program(_spoken(), floatx="float32", quick=True)
def speech_by_ctc() -> keras.Model:
    """Speech recognition: Keras's CTC loss, convolutions and a bidirectional GRU."""
    inputs = keras.Input((8, 3))
    x = layers.Conv1D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.Bidirectional(layers.GRU(3, return_sequences=True))(x)
    model = keras.Model(inputs, layers.Dense(5)(x))
    return compiled(model, keras.optimizers.Adam(1e-2, epsilon=1e-2), keras.losses.CTC())


class Endpoint(layers.Layer):
    """Adds the CTC loss, with the labels as an input."""

    def call(self, labels: Any, guesses: Any) -> Any:
        lengths = ops.ones_like(labels[:, 0])
        self.add_loss(ops.mean(ops.ctc_loss(labels, guesses, 3 * lengths, 8 * lengths)))
        return guesses


@program(Data({"image": normal(8, 4, 1), "label": integers(4, 3, low=1)}), floatx="float32")
def captcha_by_ctc() -> keras.Model:
    """Captcha recognition: a layer that adds the CTC loss, with the labels as an input."""
    image = keras.Input((8, 4, 1), name="image")
    label = keras.Input((3,), name="label", dtype="int32")
    x = layers.Conv2D(2, 3, padding="same", activation="relu")(image)
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(layers.Reshape((8, 8))(x))
    x = Endpoint()(label, layers.Dense(5)(x))
    model = keras.Model({"image": image, "label": label}, x)
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-2))
    return model


@program(Data(normal(64), integers(3)), floatx="float32")
def speaker_by_spectrum() -> keras.Model:
    """Speaker recognition: the model computes the spectrum."""
    inputs = keras.Input((64,))
    real, imaginary = ops.fft((inputs, ops.zeros_like(inputs)))
    x = ops.sqrt(ops.square(real) + ops.square(imaginary) + 1e-3)[:, :32, None]
    x = layers.MaxPooling1D(2)(layers.Conv1D(3, 3, padding="same", activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))
    return compiled(model, keras.optimizers.Adam(epsilon=1e-2), of_classes())


@program(Data(normal(64), integers(3)), floatx="float32", sync_batch_norm=True)
def spectrograms() -> keras.Model:
    """Mel and linear spectrogram layers, followed by convolutions."""
    inputs = keras.Input((64,))
    mel = layers.MelSpectrogram(16, 8, sampling_rate=64, num_mel_bins=4, min_freq=1)(inputs)
    mel = layers.BatchNormalization()(layers.Conv2D(2, 3, padding="same")(mel[..., None]))
    plain = layers.STFTSpectrogram("magnitude", 16, 8, fft_length=16)(inputs[..., None])
    pooled = [layers.GlobalMaxPooling2D()(mel), layers.GlobalAveragePooling1D()(plain)]
    model = keras.Model(inputs, layers.Dense(3)(layers.concatenate(pooled)))
    return compiled(model, keras.optimizers.SGD(0.01), of_classes())


def _accents() -> Data:
    return Data(normal(6, 2), np.eye(3)[integers(3)])


@program(_accents())
def accents() -> keras.Model:
    """Accent recognition from another network's features, with `AUC` as the metric."""
    inputs = keras.Input((6, 2))
    x = layers.Dense(4, activation="relu", kernel_constraint="max_norm")(inputs)
    x = layers.Dense(3, activation="softmax")(layers.GlobalMaxPooling1D()(x))
    loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)
    auc = keras.metrics.AUC(multi_label=True, num_labels=3)
    return compiled(keras.Model(inputs, x), "adam", loss, metrics=[auc, "categorical_accuracy"])
