"""What user code computes from a share is asked how it adds up, on halves of the first batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.support.training import X, Y, building
from tfdist.errors import UnsupportedModelError
from tfdist.step.aggregation import Aggregation
from tfdist.step.mean_or_sum import Aggregations

Value = Callable[[Any], Any]


class Adds(layers.Layer):
    """Adds a loss that is computed from the inputs."""

    def __init__(self, value: Value, in_training: bool = False) -> None:
        super().__init__()
        self.value, self.in_training = value, in_training

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training or not self.in_training:
            self.add_loss(self.value(inputs))
        return inputs


class Counts(layers.Layer):
    """Keeps a state that is computed from the inputs and the state before."""

    def __init__(self, value: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.value = value
        self.state = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.state.assign(self.value(self.state, inputs))
        return inputs


def aggregations(*made: layers.Layer, rows: int = len(X), **options: Any) -> Aggregations:
    """Returns the aggregations for a network of some layers, and then a dense one."""
    build_model = building(lambda: [keras.Input((4,)), *made, layers.Dense(1)], **options)
    model = build_model()
    model._symbolic_build(data_batch=(tf.constant(X), tf.constant(Y), None))  # losses and metrics
    return Aggregations(model, lambda: (tf.constant(X[:rows]), tf.constant(Y[:rows])))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda x: ops.mean(x**2), Aggregation.MEAN),
        (lambda x: ops.sum(x**2), Aggregation.SUM),
        (lambda x: ops.max(ops.ones_like(x)), Aggregation.MEAN),  # not of the rows
        (lambda x: 3.0 * ops.mean(ops.sum(x, -1)), Aggregation.MEAN),
        (lambda x: ops.sum(ops.abs(x)) / 7.0, Aggregation.SUM),
    ],
)
def test_added_losses(value: Value, expected: Aggregation) -> None:
    assert aggregations(Adds(value)).of_losses(1, training=True) == [expected]


def test_each_added_loss_is_asked_by_itself() -> None:
    first, second = Adds(lambda x: ops.mean(x**2)), Adds(lambda x: ops.sum(x**2))
    assert aggregations(first, second).of_losses(2, training=True) == [
        Aggregation.MEAN,
        Aggregation.SUM,
    ]


def test_a_loss_that_only_training_adds() -> None:
    assert aggregations(Adds(lambda x: ops.mean(x**2), in_training=True)).of_losses(1, True) == [
        Aggregation.MEAN
    ]


def test_noise_is_no_reason_to_refuse() -> None:
    noisy = layers.GaussianNoise(0.05), Adds(lambda x: ops.sum(x**2), in_training=True)
    assert aggregations(*noisy).of_losses(1, training=True) == [Aggregation.SUM]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda x: ops.sum(x) ** 2, "add_loss number 0 is neither a mean nor a sum over rows"),
        (lambda x: ops.std(x), "override compute_loss, which sees the whole batch"),
        (lambda x: ops.mean(1 + x[:, 0] / 10) * ops.mean(1 + x[:, 1] / 10), "neither a mean nor"),
        (lambda x: 0.0 * ops.sum(x), "is zero on the first batch"),
    ],
)
def test_added_losses_that_do_not_add_up(value: Value, says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        aggregations(Adds(value)).of_losses(1, training=True)


def test_losses_that_come_and_go() -> None:
    with pytest.raises(UnsupportedModelError, match="add 2 losses in training, but 1"):
        aggregations(Adds(lambda x: ops.mean(x**2))).of_losses(2, training=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda state, x: state + ops.sum(ops.abs(x)), Aggregation.SUM),
        (lambda state, x: 0.9 * state + ops.mean(ops.abs(x)), Aggregation.MEAN),
        (lambda state, x: state + 1.0, Aggregation.MEAN),
        (lambda state, x: state + 1e-5 * ops.mean(ops.abs(x)), Aggregation.MEAN),
    ],
)
def test_states_that_layers_update(value: Value, expected: Aggregation) -> None:
    layer = Counts(value)
    assert aggregations(layer).of_state(layer.state) == expected


@pytest.mark.parametrize(
    "value",
    [
        lambda state, x: ops.maximum(state, 1.0 + ops.sum(x) ** 2),
        lambda state, x: state + ops.mean(1 + x[:, 0] / 10) * ops.mean(1 + x[:, 1] / 10),
    ],
)
def test_a_state_that_does_not_add_up(value: Callable[[Any, Any], Any]) -> None:
    layer = Counts(value)
    with pytest.raises(UnsupportedModelError, match=r"The update of .* neither a mean nor a sum"):
        aggregations(layer).of_state(layer.state)


def test_probing_changes_nothing() -> None:
    layer = Counts(lambda state, x: state + ops.sum(ops.abs(x)))
    aggregations(layer).of_state(layer.state)
    assert float(layer.state) == 1.0


def test_one_row_tells_nothing() -> None:
    with pytest.raises(UnsupportedModelError, match="batch of 2 rows or more"):
        aggregations(Adds(lambda x: ops.mean(x**2)), rows=1).of_losses(1, training=True)


def squared(y_true: Any, y_pred: Any) -> Any:
    return ops.mean((y_true - y_pred) ** 2, -1)


def centred(y_true: Any, y_pred: Any) -> Any:
    difference = y_true - y_pred
    return ops.mean((difference - ops.mean(difference)) ** 2, -1)


@pytest.mark.parametrize(
    ("loss", "independent"), [("mse", True), ("huber", True), (squared, True), (centred, False)]
)
def test_losses_of_rows_that_move_each_other(loss: Any, independent: bool) -> None:
    assert aggregations(loss=loss).has_independent_rows(0) == independent


class OfMaximum(keras.metrics.Metric):
    """A metric whose state is no sum over rows."""

    def __init__(self) -> None:
        super().__init__(name="of_maximum")
        self.largest = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.largest


@pytest.mark.parametrize(
    ("metric", "whole"), [("mae", False), (squared, False), (centred, True), (OfMaximum, True)]
)
def test_metrics_that_need_whole_batches(metric: Any, whole: bool) -> None:
    made = metric() if isinstance(metric, type) else metric
    assert bool(aggregations(metrics=[made]).whole_metrics()) == whole
