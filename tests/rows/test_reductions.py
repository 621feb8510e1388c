"""Reductions of values in user code are inferred from the traced forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.support.training import X, Y, building
from tfdist.errors import UnsupportedModelError
from tfdist.rows.reductions import Reduction, ReductionInference

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
    """Updates state from the inputs and the previous state."""

    def __init__(self, value: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.value = value
        self.state = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.state.assign(self.value(self.state, inputs))
        return inputs


def reductions(*stack: layers.Layer, **options: Any) -> ReductionInference:
    """Returns the inferred reductions for a network of some layers and a dense one."""
    build_model = building(lambda: [keras.Input((4,)), *stack, layers.Dense(1)], **options)
    model = build_model()
    model._symbolic_build(data_batch=(tf.constant(X), tf.constant(Y), None))  # losses, metrics
    return ReductionInference(model, lambda: (tf.constant(X), tf.constant(Y)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda x: ops.mean(x**2), Reduction.MEAN),
        (lambda x: ops.sum(x**2), Reduction.SUM),
        (lambda x: ops.max(ops.ones((2, 3))), Reduction.MEAN),  # independent of the rows
        (lambda x: 3.0 * ops.mean(ops.sum(x, -1)), Reduction.MEAN),
        (lambda x: ops.sum(ops.abs(x)) / 7.0, Reduction.SUM),
        (lambda x: ops.sum(ops.abs(x)) / ops.cast(ops.shape(x)[0], "float32"), Reduction.MEAN),
        (lambda x: 0.0 * ops.sum(x) + ops.mean(x), Reduction.MEAN),
    ],
)
def test_infers_reductions_of_added_losses(value: Value, expected: Reduction) -> None:
    assert reductions(Adds(value)).loss_reductions(1, training=True) == [expected]


def test_each_added_loss_has_its_own_reduction() -> None:
    first, second = Adds(lambda x: ops.mean(x**2)), Adds(lambda x: ops.sum(x**2))
    assert reductions(first, second).loss_reductions(2, training=True) == [
        Reduction.MEAN,
        Reduction.SUM,
    ]


def test_loss_added_only_in_training() -> None:
    assert reductions(Adds(lambda x: ops.mean(x**2), in_training=True)).loss_reductions(
        1, True
    ) == [Reduction.MEAN]


def test_reduction_inference_tolerates_noise() -> None:
    noisy = layers.GaussianNoise(0.05), Adds(lambda x: ops.sum(x**2), in_training=True)
    assert reductions(*noisy).loss_reductions(1, training=True) == [Reduction.SUM]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda x: ops.sum(x) ** 2, "add_loss number 0 is neither a mean nor a sum over rows"),
        (lambda x: ops.std(x), "Override compute_loss, which gets the full batch"),
        (lambda x: ops.mean(1 + x[:, 0] / 10) * ops.mean(1 + x[:, 1] / 10), "neither a mean nor"),
    ],
)
def test_added_loss_without_a_reduction_raises(value: Value, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        reductions(Adds(value)).loss_reductions(1, training=True)


def test_conditionally_added_loss_raises() -> None:
    with pytest.raises(UnsupportedModelError, match="add 2 losses in training, but 1"):
        reductions(Adds(lambda x: ops.mean(x**2))).loss_reductions(2, training=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda state, x: state + ops.sum(ops.abs(x)), Reduction.SUM),
        (lambda state, x: 0.9 * state + ops.mean(ops.abs(x)), Reduction.MEAN),
        (lambda state, x: state + 1.0, Reduction.MEAN),
        (lambda state, x: state + 1e-5 * ops.mean(ops.abs(x)), Reduction.MEAN),
    ],
)
def test_infers_reductions_of_layer_states(value: Value, expected: Reduction) -> None:
    layer = Counts(value)
    assert reductions(layer).state_reduction(layer.state) == expected


@pytest.mark.parametrize(
    "value",
    [
        lambda state, x: ops.maximum(state, 1.0 + ops.sum(x) ** 2),
        lambda state, x: state + ops.mean(1 + x[:, 0] / 10) * ops.mean(1 + x[:, 1] / 10),
    ],
)
def test_state_without_a_reduction_raises(value: Callable[[Any, Any], Any]) -> None:
    layer = Counts(value)
    with pytest.raises(UnsupportedModelError, match=r"The update of .* neither a mean nor a sum"):
        reductions(layer).state_reduction(layer.state)


def test_reduction_inference_changes_nothing() -> None:
    layer = Counts(lambda state, x: state + ops.sum(ops.abs(x)))
    reductions(layer).state_reduction(layer.state)
    assert float(layer.state) == 1.0


def squared(y_true: Any, y_pred: Any) -> Any:
    return ops.mean((y_true - y_pred) ** 2, -1)


def centred(y_true: Any, y_pred: Any) -> Any:
    difference = y_true - y_pred
    return ops.mean((difference - ops.mean(difference)) ** 2, -1)


@pytest.mark.parametrize(
    ("loss", "independent"),
    [
        ("mse", True),
        ("huber", True),
        (squared, True),
        (centred, False),
        (lambda y, p: ops.mean((y - p) ** 2 + ops.relu(p - ops.min(p) - 99), -1), False),
        (lambda y, p: (y - p) ** 2 / (1 + ops.mean(ops.relu(y - 99))), False),
        (lambda y, p: tf.map_fn(lambda row: ops.mean(row), (y - p) ** 2), True),
    ],
)
def test_losses_with_dependent_rows_are_detected(loss: Any, independent: bool) -> None:
    rows = tf.constant(Y), tf.constant(Y)
    assert reductions(loss=loss).has_independent_rows(0, *rows) == independent


def of_words(y_true: Any, y_pred: Any) -> Any:
    """The cross-entropy of several words per row, whose logits TensorFlow reshapes."""
    logits = ops.stack([y_pred, -y_pred, 2 * y_pred], axis=-1)
    words = ops.cast(y_true > 0, "int32")
    return ops.sparse_categorical_crossentropy(words, logits, from_logits=True)


class LargestError(keras.metrics.Metric):
    """A metric whose state is not a sum over rows."""

    def __init__(self) -> None:
        super().__init__(name="largest_error")
        self.largest = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.largest


@pytest.mark.parametrize(
    ("metric", "needs_full_batch"),
    [
        ("mae", False),
        (squared, False),
        (of_words, False),
        (centred, True),
        (LargestError, True),
        (lambda y, p: ops.mean(ops.abs(y - p)), True),
        (lambda y, p: ops.cast(ops.max(y) > 99, y.dtype), True),
        (lambda y, p: ops.cast(ops.any(y > 99, -1), y.dtype), False),
        (lambda y, p: (y - p) / ops.maximum(ops.max(y), 99.0), True),
    ],
)
def test_metrics_that_need_full_batches_are_detected(metric: Any, needs_full_batch: bool) -> None:
    compiled = metric() if isinstance(metric, type) else metric
    assert bool(reductions(metrics=[compiled]).full_batch_metrics()) == needs_full_batch
