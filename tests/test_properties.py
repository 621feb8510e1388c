"""Property tests: random rows, batches, replicas, rounds and weights match one device."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from keras import layers

import tfdist
from tests.support.training import TOLERANCE, building

MAX_ROWS = 24
# Every run draws the same examples. Add failures found elsewhere as `@example`.
SETTINGS = settings(max_examples=15, deadline=None, derandomize=True)
# (strategy, replicas, accumulation rounds). Only a few, because each must be traced once.
TRAINERS = st.sampled_from(
    [("mirrored", 2, 1), ("mirrored", 3, 2), ("central_storage", 2, 3), ("towers", 3, 1)]
)


#: Plain SGD: earlier runs leave no optimizer state.
build = building(
    lambda: [
        keras.Input((2,)), layers.Dense(3, "tanh", kernel_regularizer="l2"), layers.Dense(1)
    ],
    lambda: keras.optimizers.SGD(0.1, global_clipnorm=1.0),
    loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    metrics=["mae"],
    weighted_metrics=["mse"],
)  # fmt: skip


one_device = functools.cache(build)
START = functools.cache(lambda: [np.array(weight) for weight in one_device().get_weights()])


@functools.cache
def trainer(strategy: str, num_replicas: int, accumulate: int) -> tfdist.Trainer:
    """Cached for all examples, because tracing dominates the time."""
    return tfdist.Trainer(build, strategy=strategy, devices=num_replicas, accumulate=accumulate)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Draws rows, labels and sample weights, some of them 0."""
    num_rows = draw(st.integers(1, MAX_ROWS))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    weights = st.floats(0.0, 4.0, width=16) | st.just(0.0)
    return {
        "x": random.normal(size=(num_rows, 2)).astype("float32"),
        "y": random.normal(size=(num_rows, 1)).astype("float32"),
        "sample_weight": draw(hnp.arrays("float32", num_rows, elements=weights)),
    }


def some_rows(num_rows: int, weight: float = 1.0) -> dict[str, np.ndarray]:
    """Returns fixed rows for an explicit example."""
    x = np.linspace(-1.0, 1.0, 2 * num_rows, dtype="float32").reshape(num_rows, 2)
    return {"x": x, "y": x[:, :1] ** 2, "sample_weight": np.full(num_rows, weight, "float32")}


def train(model: Any, data: dict[str, np.ndarray], batch_size: int) -> dict[str, Any]:
    """Trains a Keras model or a trainer for two epochs from the same initial weights."""
    weights = getattr(model, "model", model)
    weights.set_weights(START())
    fit = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
    history = model.fit(**data, epochs=2, **fit).history
    return {"weights": weights.get_weights(), **history}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Asserts that results differ only by rounding."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        for a, b in zip(found[name], value, strict=True):
            np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


@SETTINGS
@given(data=rows(), batch_size=st.integers(3, 13), configuration=TRAINERS)
@example(some_rows(1), 3, ("mirrored", 3, 2))
@example(some_rows(10, weight=0.0), 4, ("mirrored", 2, 1))
@example(some_rows(24), 3, ("towers", 3, 1))
def test_training_equals_one_device(
    data: dict[str, np.ndarray], batch_size: int, configuration: tuple[str, int, int]
) -> None:
    result = train(trainer(*configuration), data, batch_size)
    assert_equal(result, train(one_device(), data, batch_size))


@SETTINGS
@given(data=rows(), batch_size=st.integers(1, 13), configuration=TRAINERS)
@example(some_rows(1), 1, ("mirrored", 3, 2))
def test_evaluation_and_prediction_equal_one_device(
    data: dict[str, np.ndarray], batch_size: int, configuration: tuple[str, int, int]
) -> None:
    distributed = trainer(*configuration)
    distributed.model.set_weights(START())
    one_device().set_weights(START())
    options = {"batch_size": batch_size, "verbose": 0}
    result = distributed.evaluate(**data, return_dict=True, **options)
    wanted = one_device().evaluate(**data, return_dict=True, **options)
    assert_equal({k: [v] for k, v in result.items()}, {k: [v] for k, v in wanted.items()})
    predicted = distributed.predict(data["x"], **options)
    expected = one_device().predict(data["x"], **options)
    np.testing.assert_allclose(predicted, expected, rtol=TOLERANCE, atol=TOLERANCE)
