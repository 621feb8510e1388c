"""Cases of values that are defined for a full batch only: they are no sum over replicas.

tfdist may refuse most of these with an error, but must not return another value.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, metrics, ops

from tests.support.case import case, compiled, mlp
from tests.support.data import classes, points


def root_mean_square(y_true: Any, y_pred: Any) -> Any:
    """Returns one number per batch."""
    return ops.sqrt(ops.mean((y_true - y_pred) ** 2))


@case(points())
def metric_function_of_batch() -> keras.Model:
    """A metric function that returns one number per batch."""
    mean = lambda y_true, y_pred: ops.mean(ops.abs(y_true - y_pred))  # noqa: E731
    return compiled(mlp(), metrics=[root_mean_square, mean])


class BatchError(metrics.Metric):
    """The mean over batches of their root mean squared errors."""

    def __init__(self) -> None:
        super().__init__(name="batch_error")
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch of [rows, 1]."""
        self.total.assign_add(root_mean_square(y_true, y_pred))
        self.batches.assign_add(1.0)

    def result(self) -> Any:
        return self.total / self.batches


@case(points(), may_refuse=True)
def metric_that_counts_batches() -> keras.Model:
    """A custom metric that counts batches."""
    return compiled(mlp(), metrics=[BatchError()])


class LargestError(metrics.Metric):
    """The largest error, a state that is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Looks at errors of [rows, 1]."""
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.largest.value


@case(points(), may_refuse=True)
def metric_of_a_maximum() -> keras.Model:
    """A custom metric whose state is a maximum."""
    return compiled(mlp(), metrics=[LargestError()])


class Tracked(keras.Sequential):
    """A model with its own loss and its own metric of it, as Keras's documentation shows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = metrics.Mean(name="tracked")

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        """Returns the mean squared error, and updates the metric with it."""
        loss = ops.mean((y_pred - y) ** 2)
        self.tracker.update_state(loss)
        return loss


@case(points(), may_refuse=True)
def compute_loss_tracked() -> keras.Model:
    """`compute_loss` overridden, with a custom metric."""
    return compiled(Tracked([keras.Input((4,)), *mlp().layers]), loss=None)


class Spread(layers.Layer):
    """Adds the square of the batch's mean as a loss: neither a mean nor a sum over rows."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(ops.sum(ops.mean(inputs, axis=0) ** 2))
        return inputs


@case(points())
def add_loss_of_batch() -> keras.Model:
    """`add_loss` of a number that is neither a mean nor a sum over rows."""
    model = mlp()
    model.add(Spread())
    return compiled(model)


class Peak(layers.Layer):
    """Divides by the largest input so far, a state that is no mean over rows."""

    def build(self, shape: Any) -> None:
        self.peak = self.add_weight(shape=(), initializer="ones", trainable=False, name="peak")

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs / self.peak
        if training:
            self.peak.assign(ops.maximum(self.peak, ops.max(ops.abs(inputs))))
        return outputs


@case(points())
def layer_state_of_batch() -> keras.Model:
    """A custom layer whose state is the maximum over all batches."""
    return compiled(keras.Sequential([keras.Input((4,)), Peak(), layers.Dense(1)]))


@case(classes(), accumulate=2, may_refuse=True)
def accumulate_circle() -> keras.Model:
    """The trainer's `accumulate` with a loss that compares rows with each other."""
    return compiled(mlp(outputs=3), loss=keras.losses.Circle(gamma=2.0))


@case(points(), accumulate=2, sync_batch_norm=True, may_refuse=True)
def accumulate_batch_norm() -> keras.Model:
    """The trainer's `accumulate` with `sync_batch_norm`."""
    norm = layers.BatchNormalization(momentum=0.7)
    return compiled(keras.Sequential([keras.Input((4,)), layers.Dense(4), norm, layers.Dense(1)]))
