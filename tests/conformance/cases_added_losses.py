"""Cases of losses besides the compiled one: added, of regularizers, one for each output."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.support.case import case, compiled, mlp
from tests.support.data import Data, classes, points


class AddedLoss(layers.Layer):
    """Adds a loss of its inputs, averaged or summed over the rows."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.reduce = reduce

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * self.reduce(inputs**2))
        return inputs


@case(points())
def add_loss_mean() -> keras.Model:
    """`add_loss` of a mean over rows."""
    model = mlp()
    model.add(AddedLoss(ops.mean))
    return compiled(model)


@case(points())
def add_loss_sum() -> keras.Model:
    """`add_loss` of a sum over rows."""
    model = mlp()
    model.add(AddedLoss(ops.sum))
    return compiled(model)


class Shrunk(layers.Dense):
    """A dense layer that adds a penalty on its weights by hand."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.05 * ops.sum(self.kernel**2))
        return super().call(inputs)


@case(points())
def add_loss_of_weights() -> keras.Model:
    """`add_loss` of a penalty on weights."""
    return compiled(keras.Sequential([keras.Input((4,)), Shrunk(3, "tanh"), layers.Dense(1)]))


@case(points())
def add_loss_only() -> keras.Model:
    """`add_loss` and no other loss, no labels."""
    model = mlp()
    model.add(AddedLoss(ops.mean))
    return compiled(model, loss=None)


@case(points())
def activity_regularizer() -> keras.Model:
    """An activity regularizer."""
    hidden = layers.Dense(3, activation="tanh", activity_regularizer=keras.regularizers.L2(0.02))
    return compiled(keras.Sequential([keras.Input((4,)), hidden, layers.Dense(1)]))


@case(points())
def weight_regularizer() -> keras.Model:
    """Weight regularizers."""
    hidden = layers.Dense(3, activation="tanh", kernel_regularizer="l2", bias_regularizer="l1")
    return compiled(keras.Sequential([keras.Input((4,)), hidden, layers.Dense(1)]))


def _two_headed(*, as_dict: bool) -> keras.Model:
    """A model with an output for regression and one for classes."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, activation="tanh")(inputs)
    value = layers.Dense(1, name="value")(hidden)
    kind = layers.Dense(3, activation="softmax", name="kind")(hidden)
    return keras.Model(inputs, {"value": value, "kind": kind} if as_dict else [value, kind])


@case(Data(points().x, [points().y, classes().y]))
def several_losses_list() -> keras.Model:
    """Two outputs as a list, with `loss_weights`."""
    losses = ["mse", "sparse_categorical_crossentropy"]
    return compiled(_two_headed(as_dict=False), loss=losses, loss_weights=[0.3, 2.0])


@case(
    Data(
        points().x,
        {"value": points().y, "kind": classes().y},
        {
            "value": points(weighted=True).sample_weight,
            "kind": classes(weighted=True).sample_weight,
        },
    ),
    feed="dataset",
)
def several_losses_dict() -> keras.Model:
    """Two outputs as a dictionary, with `loss_weights`, sample weights and metrics for each."""
    return compiled(
        _two_headed(as_dict=True),
        loss={"value": keras.losses.Huber(), "kind": "sparse_categorical_crossentropy"},
        loss_weights={"value": 0.3, "kind": 2.0},
        metrics={"value": ["mae"], "kind": ["accuracy"]},
        weighted_metrics={"kind": ["accuracy"]},
    )


class Router(layers.Layer):
    """Chooses among experts, with initial weights near zero, as is usual."""

    def build(self, shape: Any) -> None:
        nearly_zero = keras.initializers.RandomNormal(stddev=1e-4)
        self.kernel = self.add_weight(name="kernel", shape=(shape[-1], 3), initializer=nearly_zero)

    def call(self, inputs: Any) -> Any:
        chosen = ops.softmax(5.0 * inputs @ self.kernel)
        self.add_loss(1.0 + 3.0 * ops.sum(ops.square(ops.mean(chosen, axis=0))))
        return chosen


@case(points(), epochs=6)
def add_loss_of_router() -> keras.Model:
    """`add_loss` of a square of means, which looks like a mean at the first weights."""
    inputs = keras.Input((4,))
    experts = layers.Dense(3, "tanh")(inputs)
    outputs = layers.Dense(1)(experts * Router()(inputs))
    return compiled(keras.Model(inputs, outputs))


def _of_both(y_true: Any, y_pred: Any) -> Any:
    """Returns one number for each row of two outputs [rows, 1] each."""
    difference = (y_true["a"] - y_pred["a"]) ** 2 + ops.abs(y_true["b"] - y_pred["b"])
    return ops.mean(difference * (1.0 + y_pred["b"] ** 2), axis=-1)


@case(Data(points().x, {"a": points().y, "b": points(outputs=2).y[:, 1:]}))
def loss_of_structure() -> keras.Model:
    """One loss function that receives a dictionary of outputs."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, "tanh")(inputs)
    outputs = {"a": layers.Dense(1)(hidden), "b": layers.Dense(1)(hidden)}
    return compiled(keras.Model(inputs, outputs), loss=[_of_both])
