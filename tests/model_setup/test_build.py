"""Models, losses and metrics are built without tracing a model whose output shapes are known."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.training import assert_close
from tfdist import Trainer

X = np.random.default_rng(0).random((8, 4)).astype("float32")
Y = np.arange(8) % 3


class CountsCalls(layers.Layer):
    calls = 0

    def call(self, x: Any) -> Any:
        CountsCalls.calls += 1
        return x


class DeclaresWrongShape(layers.Layer):
    def call(self, x: Any) -> Any:
        return keras.ops.concatenate([x, x, x], axis=-1)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


def functional(last: layers.Layer, units: int) -> keras.Model:
    inputs = keras.Input((4,))
    outputs = last(layers.Dense(units, kernel_initializer="zeros", bias_initializer="ones")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@pytest.mark.parametrize("shape", [(4,), None])
def test_first_fit_traces_a_functional_model_once(shape: tuple[int, ...] | None) -> None:
    model = functional(CountsCalls(), 3)
    if shape is None:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3), CountsCalls()])
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    trainer = Trainer(model, strategy="one_device")
    CountsCalls.calls = 0
    trainer.fit(X, Y, batch_size=4, verbose=0)
    assert CountsCalls.calls == 1


def test_wrong_declared_output_shape_does_not_choose_another_metric() -> None:
    # "accuracy" is binary for one output column and categorical for three.
    plain = functional(DeclaresWrongShape(), 1)
    ours = Trainer(lambda: functional(DeclaresWrongShape(), 1), strategy="one_device")
    expected = plain.fit(X, Y, batch_size=4, verbose=0).history
    assert ours.fit(X, Y, batch_size=4, verbose=0).history == pytest.approx(expected)


@pytest.mark.parametrize("form", [list, tuple])
def test_a_loss_gets_the_only_output_of_a_list_as_the_model_returns_it(form: type) -> None:
    def one_output() -> keras.Model:
        inputs = keras.Input((4,))
        model = keras.Model(inputs, form([layers.Dense(4, kernel_initializer="zeros")(inputs)]))
        model.compile("sgd", "mse")
        return model

    # As many columns as a replica has rows: a single row would be taken for all of them.
    expected = one_output().fit(X, X, batch_size=8, verbose=0, epochs=2).history
    ours = Trainer(one_output, strategy="mirrored", devices=2)
    assert_close(ours.fit(X, X, batch_size=8, verbose=0, epochs=2).history, expected)
