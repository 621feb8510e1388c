"""Cases of metrics that are not averages of the batches' values."""

from __future__ import annotations

from typing import Any

import keras
from keras import metrics, ops

from tests.support.case import case, compiled, mlp
from tests.support.data import Data, classes, one_hot, points

BINARY = Data(points().x, (points().y > 0.5).astype("float32"), points(weighted=True).sample_weight)


@case(Data(BINARY.x, BINARY.y))
def auc() -> keras.Model:
    """The area under a curve (`AUC`)."""
    model = mlp(activation="sigmoid")
    return compiled(model, loss="binary_crossentropy", metrics=[metrics.AUC(50, name="auc")])


@case(BINARY)
def precision_and_recall() -> keras.Model:
    """`Precision` and `Recall`, plain and weighted."""
    return compiled(
        mlp(activation="sigmoid"),
        loss="binary_crossentropy",
        metrics=[metrics.Precision(name="precision"), metrics.Recall(name="recall")],
        weighted_metrics=[metrics.Precision(name="weighted_precision")],
    )


@case(one_hot(classes()))
def f1_score() -> keras.Model:
    """`F1Score` over classes."""
    model = mlp(outputs=3, activation="softmax")
    scores = [metrics.F1Score(average="macro", name="f1")]
    return compiled(model, loss="categorical_crossentropy", metrics=scores)


@case(classes(weighted=True))
def mean_iou() -> keras.Model:
    """`MeanIoU` from a confusion matrix, weighted."""
    return compiled(
        mlp(outputs=3, activation="softmax"),
        loss="sparse_categorical_crossentropy",
        metrics=[metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
        weighted_metrics=[metrics.MeanIoU(3, sparse_y_pred=False, name="iou")],
    )


@case(points(outputs=2))
def regression_metrics() -> keras.Model:
    """`R2Score` and `RootMeanSquaredError`."""
    scores = [metrics.R2Score(name="r2"), metrics.RootMeanSquaredError(name="rmse")]
    return compiled(mlp(outputs=2), metrics=scores)


class Bias(metrics.Metric):
    """The mean signed error, from two sums."""

    def __init__(self) -> None:
        super().__init__(name="bias")
        self.total = self.add_variable((), "zeros", name="total")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the errors of [rows, 1]."""
        self.total.assign_add(ops.sum(y_pred - y_true))
        self.rows.assign_add(ops.cast(ops.size(y_true), "float32"))

    def result(self) -> Any:
        return self.total / self.rows


@case(points())
def custom_metric() -> keras.Model:
    """A custom metric made of sums, and a metric function."""
    return compiled(mlp(), metrics=[Bias(), cubic_error])


def cubic_error(y_true: Any, y_pred: Any) -> Any:
    """The mean cubed error of each row."""
    return ops.mean((y_pred - y_true) ** 3, axis=-1)


class Counting(keras.Sequential):
    """A model that reports the size of its outputs by a metric it updates in `call`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.size = metrics.Mean(name="size")

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        outputs = super().call(inputs, training=training, mask=mask)
        self.size.update_state(ops.abs(outputs))
        return outputs


@case(points())
def metric_in_call() -> keras.Model:
    """A metric that the model itself updates."""
    return compiled(Counting([keras.Input((4,)), *mlp().layers]))


class _RandomTies(metrics.Mean):
    """Adds noise to the outputs, as ranking metrics do to break ties."""

    def __init__(self) -> None:
        super().__init__(name="ties")
        self.seed_generator = keras.random.SeedGenerator(3)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds the mean of [rows, 1]."""
        noise = keras.random.uniform(ops.shape(y_pred), seed=self.seed_generator)
        super().update_state(ops.abs(y_true - y_pred - noise), sample_weight)


@case(points(), is_random=True)
def metric_with_noise() -> keras.Model:
    """A metric that draws random numbers by a seed of its own."""
    return compiled(mlp(), metrics=[_RandomTies()])
