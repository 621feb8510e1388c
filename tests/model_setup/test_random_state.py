"""A script's random state after training equals that of plain Keras."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest

from tfdist.trainer import Trainer

X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
Y = np.arange(24) % 3


def build(*inputs: keras.KerasTensor) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([*inputs, layers.Dense(8), layers.Dropout(0.3), layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def build_with_input() -> keras.Model:
    return build(keras.Input((6,)))


def two_models(make: Any) -> tuple[list[float], list[np.ndarray], float, float]:
    """Trains two models in one script.

    Returns:
        The losses of the second model, its initial weights, and random numbers of Python and NumPy
        after the training.
    """
    keras.utils.set_random_seed(3)
    make().fit(X, Y, batch_size=8, epochs=1, validation_split=0.25, verbose=0)
    second = make()
    weights = getattr(second, "model", second).get_weights()
    losses = second.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]
    return losses, weights, random.random(), float(np.random.rand())


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[np.ndarray], float, float]:
    """What `two_models` returns for plain Keras."""
    return two_models(build_with_input)


def test_model_without_an_input_is_initialized_as_in_plain_keras() -> None:
    result = two_models(lambda: Trainer(build(), "mirrored", devices=2))
    np.testing.assert_allclose(result[0], two_models(build)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("argument", "strategy"),
    [
        ("model", "one_device"),
        ("function", "mirrored"),
        pytest.param("function", "one_device", marks=pytest.mark.check),
        pytest.param("function", "sharded", marks=pytest.mark.check),
        pytest.param("model", "mirrored", marks=pytest.mark.check),
        pytest.param("model", "sharded", marks=pytest.mark.check),
    ],
)
def test_second_model_is_initialized_as_in_plain_keras(
    argument: str, strategy: str, plain: tuple[list[float], list[np.ndarray], float, float]
) -> None:
    devices = 1 if strategy == "one_device" else 2
    result = two_models(
        lambda: Trainer(
            build_with_input if argument == "function" else build_with_input(),
            strategy,
            devices=devices,
        )
    )
    for actual, expected in zip(result[1], plain[1], strict=True):
        np.testing.assert_equal(actual, expected)
    np.testing.assert_allclose(result[0], plain[0], rtol=1e-5)
    assert result[2:] == plain[2:]
