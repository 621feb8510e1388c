"""Models that the trainer refuses, or changes with a warning."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tests.support.classifier import X, build, fit, network
from tfdist.errors import (
    ConfigurationError,
    UnsupportedModelError,
)


def test_fit_of_an_uncompiled_model() -> None:
    with pytest.raises(ConfigurationError, match=r"call model\.compile"):
        fit(network)


def test_rebuilds_a_model_with_its_weights() -> None:
    model = build()
    trainer = tfdist.Trainer(model, devices=2)
    assert trainer.model is not model
    for mine, given in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, given)


def test_optimizer_of_another_trainer() -> None:
    optimizer = keras.optimizers.SGD()

    def shared() -> keras.Model:
        model = network()
        model.compile(optimizer, "mse")
        return model

    first = tfdist.Trainer(shared, strategy="one_device")
    with pytest.raises(ConfigurationError, match="create the optimizer inside build_model"):
        tfdist.Trainer(shared, strategy="one_device")
    assert first.model.optimizer is optimizer


class Unbuildable(keras.Model):
    def call(self, inputs: Any) -> Any:
        raise ZeroDivisionError("no way to build this")


def test_a_model_that_cannot_be_built() -> None:
    def build_model() -> keras.Model:
        model = Unbuildable()
        model.compile("sgd", "mse")
        return model

    with pytest.raises(UnsupportedModelError, match="cannot be built from the data's shapes"):
        fit(build_model)


def test_accumulating_a_full_batch_loss_raises() -> None:
    def build_model() -> keras.Model:
        model = network()
        model.compile("sgd", lambda y_true, y_pred: keras.ops.std(y_true - y_pred))
        return model

    with pytest.raises(UnsupportedModelError, match=r"needs the full batch .* Use accumulate=1"):
        fit(build_model, y=X[:, :3], accumulate=2)


class AddsSquaredSum(layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.sum(inputs) ** 2)
        return inputs


def test_accumulating_an_unknown_added_loss_raises() -> None:
    def build_model() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), AddsSquaredSum(), layers.Dense(3)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(UnsupportedModelError, match=r"neither a mean nor a sum .* accumulate=1"):
        fit(build_model, y=X[:, :3], accumulate=2)


def test_precision_of_a_built_model_raises() -> None:
    with pytest.raises(ConfigurationError, match="pass the function that builds it"):
        tfdist.Trainer(build(), devices=2, precision="mixed_float16")


@pytest.mark.parametrize("strategy", ["central_storage", "towers"])
def test_unsupported_xla_is_ignored_with_a_warning(strategy: str) -> None:
    def build_model() -> keras.Model:
        model = network()
        model.compile("sgd", "mse", jit_compile=True)
        return model

    with pytest.warns(UserWarning, match="jit_compile=True is ignored"):
        fit(build_model, y=X[:, :3], strategy=strategy)


def test_xla_with_synchronized_batch_norm_raises() -> None:
    def build_model() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(3)])
        model.compile("sgd", "mse", jit_compile=True)
        return model

    with pytest.raises(ConfigurationError, match="Compile the model with jit_compile=False"):
        fit(build_model, y=X[:, :3], sync_batch_norm=True)
