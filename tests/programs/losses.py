"""Every loss and every metric of Keras: each model has many outputs, with a loss for each."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, losses, metrics

from tests.programs.program import program
from tests.programs.rows import integers, normal
from tests.support.case import compiled
from tests.support.data import Data

ONE_HOT = np.eye(3)[integers(3)]


def with_losses(
    activation: str | None, units: int, compiled_losses: list[Any], **options: Any
) -> keras.Model:
    """Returns a model with an output for each loss."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, activation="tanh")(inputs)
    outputs = [
        layers.Dense(units, activation=activation, name=f"by{i}")(hidden)
        for i in range(len(compiled_losses))
    ]
    return compiled(
        keras.Model(inputs, outputs), keras.optimizers.SGD(0.05), compiled_losses, **options
    )


def _numbers() -> list[losses.Loss]:
    return [
        losses.CosineSimilarity(),
        losses.Huber(),
        losses.LogCosh(),
        losses.MeanAbsoluteError(),
        losses.MeanAbsolutePercentageError(),
        losses.MeanSquaredError(),
        losses.MeanSquaredLogarithmicError(),
        losses.Poisson(),
        losses.KLDivergence(),
    ]


@program(Data(normal(4), [np.abs(normal(3, seed=2)) + 0.1] * 9))
def of_numbers() -> keras.Model:
    """Regression losses, one for each of nine outputs."""
    return with_losses("softplus", 3, _numbers())


@program(Data(normal(4), [ONE_HOT] * 9 + [integers(3)] * 2), quick=True)
def of_classes() -> keras.Model:
    """Classification losses, one for each of eleven outputs."""
    compiled_losses = [
        losses.BinaryCrossentropy(),
        losses.CategoricalCrossentropy(),
        losses.CategoricalFocalCrossentropy(),
        losses.CategoricalHinge(),
        losses.Hinge(),
        losses.SquaredHinge(),
        losses.KLDivergence(),
        losses.Dice(axis=-1),
        losses.Tversky(axis=-1),
        losses.CategoricalGeneralizedCrossEntropy(),
        losses.SparseCategoricalCrossentropy(),
    ]
    return with_losses("softmax", 3, compiled_losses)


class Doubled(keras.Model):
    """A model whose loss is twice the compiled loss."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return 2.0 * super().compute_loss(*args, **options)


@program(Data(normal(4), [ONE_HOT]))
def binary_focal() -> keras.Model:
    """Binary focal loss, which Keras computes from the logits behind the probabilities."""
    return with_losses("softmax", 3, [losses.BinaryFocalCrossentropy()])


@program(Data(normal(4), ONE_HOT), quick=True)
def of_logits_extended() -> keras.Model:
    """An overridden `compute_loss` that uses the logits behind the probabilities."""
    inputs = keras.Input((4,))
    model = Doubled(inputs, layers.Dense(3, activation="softmax")(inputs))
    return compiled(model, keras.optimizers.SGD(0.05), losses.BinaryCrossentropy())


@program(Data(normal(4), [ONE_HOT, ONE_HOT, integers(3)]))
def of_whole_batches() -> keras.Model:
    """Losses that need the full batch: Dice, Tversky and Circle."""
    return with_losses("softmax", 3, [losses.Dice(), losses.Tversky(), losses.Circle()])


def _scored(activation: str | None, units: int, loss: Any, scores: list[Any]) -> keras.Model:
    outputs = layers.Dense(units, activation=activation)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="tanh"), outputs])
    return compiled(model, keras.optimizers.SGD(0.05), loss, metrics=scores)


@program(Data(normal(4), np.abs(normal(2, seed=2)) + 0.1))
def metrics_of_numbers() -> keras.Model:
    """Regression metrics."""
    return _scored(
        "softplus", 2, "mse",
        [
            metrics.ConcordanceCorrelation(),
            metrics.CosineSimilarity(),
            metrics.KLDivergence(),
            metrics.LogCoshError(),
            metrics.MeanAbsoluteError(),
            metrics.MeanAbsolutePercentageError(),
            metrics.MeanSquaredError(),
            metrics.MeanSquaredLogarithmicError(),
            metrics.PearsonCorrelation(),
            metrics.Poisson(),
            metrics.R2Score(),
            metrics.RootMeanSquaredError(),
            metrics.MeanMetricWrapper(keras.losses.huber, "wrapped"),
        ],
    )  # fmt: skip


@program(Data(normal(4), integers(2, 1)), quick=True)
def metrics_of_two_classes() -> keras.Model:
    """Binary classification metrics."""
    return _scored(
        "sigmoid", 1, "binary_crossentropy",
        [
            metrics.AUC(),
            metrics.Accuracy(),
            metrics.BinaryAccuracy(),
            metrics.BinaryCrossentropy(),
            metrics.BinaryIoU(),
            metrics.FalseNegatives(),
            metrics.FalsePositives(),
            metrics.Hinge(),
            metrics.Precision(),
            metrics.PrecisionAtRecall(0.5),
            metrics.Recall(),
            metrics.RecallAtPrecision(0.5),
            metrics.SensitivityAtSpecificity(0.5),
            metrics.SpecificityAtSensitivity(0.5),
            metrics.SquaredHinge(),
            metrics.TrueNegatives(),
            metrics.TruePositives(),
        ],
    )  # fmt: skip


@program(Data(normal(4), ONE_HOT), floatx="float32")
def metrics_of_several_classes() -> keras.Model:
    """Multi-class metrics with one-hot labels."""
    return _scored(
        "softmax", 3, "categorical_crossentropy",
        [
            metrics.CategoricalAccuracy(),
            metrics.CategoricalCrossentropy(),
            metrics.CategoricalHinge(),
            metrics.F1Score(),
            metrics.FBetaScore(beta=2.0),
            metrics.OneHotIoU(3, [0, 1]),
            metrics.OneHotMeanIoU(3),
            metrics.TopKCategoricalAccuracy(2),
        ],
    )  # fmt: skip


@program(Data(normal(4), integers(3)), floatx="float32")
def metrics_of_class_numbers() -> keras.Model:
    """Multi-class metrics with integer labels, plain and weighted."""
    loss = "sparse_categorical_crossentropy"
    return _scored(
        "softmax", 3, loss,
        [
            metrics.IoU(3, [0, 2], sparse_y_pred=False),
            metrics.MeanIoU(3, sparse_y_pred=False),
            metrics.SparseCategoricalAccuracy(),
            metrics.SparseCategoricalCrossentropy(),
            metrics.SparseTopKCategoricalAccuracy(2),
        ],
    )  # fmt: skip


class Seen(keras.layers.Layer):
    """Updates a sum and a mean with its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.mean = metrics.Sum(name="sum"), metrics.Mean(name="mean")

    def call(self, x: Any) -> Any:
        self.sum.update_state(x)
        self.mean.update_state(x)
        return x


@program(Data(normal(4), normal(1)))
def metrics_within_a_layer() -> keras.Model:
    """`Sum` and `Mean`, updated by a layer."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2), Seen(), layers.Dense(1)])
    return compiled(model, "adam")
