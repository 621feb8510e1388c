"""A small classifier for tests of data, models and options that the trainer refuses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

import tfdist

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
LABELS = np.arange(12) % 3


def network() -> keras.Sequential:
    return keras.Sequential([keras.Input((4,)), layers.Dense(3)])


def build() -> keras.Model:
    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def fit(build_model: Any = build, x: Any = X, y: Any = LABELS, **options: Any) -> tfdist.Trainer:
    trainer = tfdist.Trainer(build_model, devices=2, **options)
    trainer.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    return trainer
