"""Cases of losses: reductions, custom functions, and overridden methods."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.support.case import case, compiled, mlp
from tests.support.data import classes, one_hot, points


@case(points(), batch_size=6)
def loss_sum() -> keras.Model:
    """Loss reduction `sum`."""
    return compiled(
        mlp(), keras.optimizers.SGD(0.02), keras.losses.MeanSquaredError(reduction="sum")
    )


@case(points(outputs=2))
def loss_mean() -> keras.Model:
    """Loss reduction `sum_over_batch_size`."""
    return compiled(mlp(outputs=2), loss=keras.losses.Huber(0.4))


@case(points(weighted=True))
def loss_mean_with_sample_weight() -> keras.Model:
    """Loss reduction `mean_with_sample_weight`."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return compiled(mlp(), loss=loss)


@case(points())
def loss_not_reduced() -> keras.Model:
    """Loss reduction `none`, which sums the rows' gradients."""
    loss = keras.losses.MeanSquaredError(reduction="none")
    return compiled(mlp(), keras.optimizers.SGD(0.02), loss)


def cubed(y_true: Any, y_pred: Any) -> Any:
    """A loss per row."""
    return ops.mean(ops.abs(y_true - y_pred) ** 3, axis=-1)


@case(points(weighted=True))
def loss_function_of_rows() -> keras.Model:
    """A custom loss function that returns a number per row."""
    return compiled(mlp(), keras.optimizers.SGD(0.05), cubed)


@case(points())
def loss_function_mean() -> keras.Model:
    """A custom loss function that returns the batch's mean."""
    return compiled(mlp(), loss=lambda y_true, y_pred: ops.mean((y_true - y_pred) ** 2))


@case(points())
def loss_function_sum() -> keras.Model:
    """A custom loss function that returns the batch's sum."""
    loss = lambda y_true, y_pred: ops.sum((y_true - y_pred) ** 2)  # noqa: E731
    return compiled(mlp(), keras.optimizers.SGD(0.02), loss)


@case(one_hot(classes()))
def dice() -> keras.Model:
    """A loss that is a ratio of sums over the batch (Dice)."""
    return compiled(mlp(outputs=3, activation="softmax"), keras.optimizers.SGD(1.0), "dice")


@case(classes())
def circle() -> keras.Model:
    """A loss that compares rows with each other (Circle)."""
    return compiled(mlp(outputs=3), loss=keras.losses.Circle(gamma=2.0))


class MeanError(keras.Sequential):
    """A model with a custom loss, a mean over the rows."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        """Returns the mean fourth power of the errors, plus the penalties of regularizers."""
        return ops.mean((y - y_pred) ** 4) + ops.sum(self.losses)


@case(points())
def compute_loss_mean() -> keras.Model:
    """`compute_loss` overridden by a mean over rows, with a regularizer."""
    hidden = layers.Dense(3, activation="tanh", kernel_regularizer="l2")
    model = MeanError([keras.Input((4,)), hidden, layers.Dense(1)])
    return compiled(model, keras.optimizers.SGD(0.02), None, metrics=["mae"])


class Smooth(keras.Sequential):
    """A model that adds to the loss it is compiled with."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        """The compiled loss and a penalty on the outputs' size."""
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.1 * ops.mean(y_pred**2)


@case(points(weighted=True))
def compute_loss_extended() -> keras.Model:
    """`compute_loss` overridden to add to the compiled loss, with sample weights."""
    return compiled(Smooth([keras.Input((4,)), *mlp().layers]))


class Contrastive(keras.Sequential):
    """A model whose loss compares every row with all rows of its batch."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **_: Any
    ) -> Any:
        """The cross entropy of finding each row's label among all labels of the batch."""
        target = ops.flip(ops.arange(ops.shape(y)[0]))
        # The gradient of rows that are looked up is a tf.IndexedSlices.
        similarity = ops.take(y_pred, target, axis=0) @ ops.transpose(y)
        return ops.mean(
            keras.losses.sparse_categorical_crossentropy(target, similarity, from_logits=True)
        )


@case(points(16, outputs=2))
def compute_loss_contrastive() -> keras.Model:
    """`compute_loss` overridden by a loss that compares rows with each other."""
    hidden = layers.Dense(3, activation="tanh")
    return compiled(Contrastive([keras.Input((4,)), hidden, layers.Dense(2)]), loss=None)
