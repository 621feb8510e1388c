"""Data and models that a trainer refuses, what it says, and other errors."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support.case import compiled
from tests.support.classifier import LABELS, X, build, fit, network
from tests.support.starting import run
from tfdist.errors import (
    ConfigurationError,
    DataError,
    DeviceError,
    NonFiniteError,
    TfdistError,
    UnsupportedModelError,
)
from tfdist.strategies.one_device import OneDevice


@pytest.mark.parametrize("labels", [np.zeros((12, 2)), np.zeros((12, 5, 1))])
def test_labels_of_wrong_shape_raise(labels: np.ndarray) -> None:
    with pytest.raises(DataError, match="is incompatible with the model") as caught:
        fit(y=labels)
    assert str(labels.shape[1:])[1:-1].rstrip(",") in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"y": LABELS[:5]}, "Data cardinality is ambiguous"),
        ({"y": LABELS.astype("str")}, "Cannot read the data: Invalid dtype"),
        ({"y": None}, "is incompatible with the model: .* y None"),
        ({"y": np.full(12, 7)}, "label value of 7 which is outside"),
        ({"x": X[:, :2]}, "expected axis -1 of input shape to have value 4"),
        ({"x": X[:0], "y": LABELS[:0]}, "has no batches"),
        ({"x": object(), "y": None}, r"Unrecognized data type[\s\S]*Pass data that keras\.Model"),
    ],
    ids=["few labels", "text", "no labels", "label beyond", "inputs", "no rows", "another type"],
)
def test_unusable_data_raise(data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        fit(**data)


def no_rows(kind: str) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(4)
    if kind == "generator":
        return (batch for batch in [])
    return data.take(0) if kind == "known length" else data.filter(lambda *_: False)


@pytest.mark.parametrize("kind", ["generator", "known length", "unknown length"])
def test_data_without_batches_raise(kind: str) -> None:
    trainer = tfdist.Trainer(build, devices=2)
    for call in (trainer.fit, trainer.evaluate, trainer.predict):
        with pytest.raises(DataError, match=r"has no batches. Check|at least one batch"):
            call(no_rows(kind), verbose=0)


def test_nan_in_the_first_batch_raises() -> None:
    x = X.copy()
    x[1, 2] = np.nan
    with pytest.raises(NonFiniteError, match="1 values of a batch are NaN"):
        fit(x=x)


def test_nan_loss_from_finite_data_raises() -> None:
    def build_model() -> keras.Model:
        model = network()
        model.compile("sgd", lambda y_true, y_pred: keras.ops.log(-keras.ops.abs(y_pred) - 1.0))
        return model

    with pytest.raises(NonFiniteError, match=r"are finite.*check the loss"):
        fit(build_model, y=X[:, :3])


def test_negative_number_of_steps_raises() -> None:
    trainer = tfdist.Trainer(build, "one_device")
    with pytest.raises(ConfigurationError, match="-1 steps per epoch: expected a positive number"):
        trainer.fit(X, LABELS, steps_per_epoch=-1, verbose=0)


def test_fit_of_an_uncompiled_model_raises() -> None:
    with pytest.raises(ConfigurationError, match=r"Call model\.compile"):
        fit(network)


class Unbuildable(keras.Model):
    def call(self, inputs: Any) -> Any:
        raise ZeroDivisionError("no way to build this")


class AddsSquaredSum(layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.sum(inputs) ** 2)
        return inputs


def squared_sum() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), AddsSquaredSum(), layers.Dense(3)])


class CountsRows(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.count = tf.Variable(0.0, trainable=False)

    def call(self, inputs: Any) -> Any:
        self.count.assign_add(keras.ops.cast(keras.ops.shape(inputs)[0], "float32"))
        return inputs / self.count


def counts_rows() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), CountsRows(), layers.Dense(3)])


class DropsSometimes(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5, seed=1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        def dropped() -> Any:
            return self.dropout(inputs, training=training)

        return keras.ops.cond(keras.ops.sum(inputs) > 0, dropped, lambda: inputs)


def draws_in_a_branch() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), DropsSometimes(), layers.Dense(3)])


class CountsPositiveBatches(layers.Layer):
    """Assigns a tensor from outside of the branch, which is of the outer graph."""

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="count"
        )

    def call(self, inputs: Any) -> Any:
        more = self.count + 1

        def counted() -> Any:
            self.count.assign(more)
            return inputs

        return keras.ops.cond(keras.ops.sum(inputs) > 0, counted, lambda: inputs)


def counts_in_a_branch() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), CountsPositiveBatches(), layers.Dense(3)])


class Largest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.largest = tf.Variable(0.0, trainable=False)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        del y_true, sample_weight
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred)))

    def result(self) -> Any:
        return tf.identity(self.largest)


def spread(y_true: Any, y_pred: Any) -> Any:
    """A loss that is neither a mean nor a sum over rows."""
    return keras.ops.std(y_true - y_pred)


@pytest.mark.parametrize(
    ("make", "loss", "accumulate", "message"),
    [
        (Unbuildable, "mse", 1, "cannot be built from the data's shapes"),
        (network, spread, 2, "needs the full batch .* Use accumulate=1"),
        (draws_in_a_branch, "mse", 1, "seed_generator_state' is assigned in a branch"),
        (counts_in_a_branch, "mse", 1, "count' is assigned in a branch"),
        (squared_sum, "mse", 2, "neither a mean nor a sum .* accumulate=1"),
    ],
)
def test_unsupported_models_raise(make: Any, loss: Any, accumulate: int, message: str) -> None:
    def build_model() -> keras.Model:
        return compiled(make(), loss=loss)

    with pytest.raises(UnsupportedModelError, match=message):
        fit(build_model, y=X[:, :3], accumulate=accumulate)


@pytest.mark.parametrize(("make", "metrics"), [(counts_rows, []), (network, [Largest])])
def test_tf_variable_of_a_layer_or_metric_raises(make: Any, metrics: Any) -> None:
    def build_model() -> keras.Model:
        return compiled(make(), metrics=[metric() for metric in metrics])

    with pytest.raises(UnsupportedModelError, match=r"model assigns to the tf\.Variable"):
        fit(build_model, y=X[:, :3])


@pytest.mark.parametrize("strategy", ["central_storage", "towers"])
def test_unsupported_xla_is_ignored_with_a_warning(strategy: str) -> None:
    def build_model() -> keras.Model:
        return compiled(network(), jit_compile=True)

    with pytest.warns(UserWarning, match="jit_compile=True is ignored"):
        fit(build_model, y=X[:, :3], strategy=strategy)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigurationError, ValueError),
        (DataError, ValueError),
        (DeviceError, RuntimeError),
        (NonFiniteError, ArithmeticError),
        (UnsupportedModelError, TypeError),
    ],
)
def test_errors_derive_from_tfdist_error_and_a_builtin(error: type, builtin: type) -> None:
    assert issubclass(error, TfdistError)
    assert issubclass(error, builtin)


def test_option_of_another_strategy_raises() -> None:
    with pytest.raises(ConfigurationError, match="'mirrored' has no option 'parameter_device'"):
        tfdist.strategies.create("mirrored", 2, parameter_device="CPU:0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate=0: expected an integer of at least 1"),
        ({"accumulate": "2"}, "accumulate='2': expected an integer of at least 1"),
        ({"accumulate": 2, "sync_batch_norm": True}, "Use only one of the two"),
        ({"checkpoints": "runs/a"}, r"expected tfdist\.Checkpoints\('runs/a'\)"),
        ({"strategy": "mirorred"}, "mirrored, central_storage, towers"),
        ({"strategy": None}, "strategy=None: expected a tfdist Strategy or one of the names"),
        ({"strategy": tf.distribute.get_strategy()}, "expected a tfdist Strategy or one of"),
        ({"strategy": OneDevice()}, "devices= has no effect"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        tfdist.Trainer(build, devices=2, **options)


STARTED = """
import warnings
import tensorflow as tf
tf.constant(1) + 1
import tfdist
from tests.support import ROOT
from tests.support.classifier import X, LABELS, build
try:
    tfdist.Trainer(build, devices=2)
except tfdist.errors.DeviceError as error:
    print("raised:", error)
print(tfdist.Trainer(build, "mirrored").strategy.num_replicas, "replica with a warning")
warnings.simplefilter("error", UserWarning)
trainer = tfdist.Trainer(build)
trainer.fit(X, LABELS, batch_size=4, verbose=0)
print("replicas:", trainer.strategy.num_replicas)
"""


def test_tensorflow_that_started_first_limits_the_devices() -> None:
    # As in a notebook: there is no script that tfdist could search for the number of devices.
    done = run(sys.executable, "-c", "import tfdist.errors\n" + STARTED)
    assert "raised: Expected 2 logical CPU devices" in done.stdout
    assert "Call tfdist.devices.configure(2) before the first" in done.stdout
    assert "Continuing with 1" in done.stderr
    assert "1 replica with a warning" in done.stdout
    assert "replicas: 1" in done.stdout
