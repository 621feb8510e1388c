"""What the trainer refuses, or mends and says so: each message has what came and the cure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support import ROOT
from tfdist.errors import (
    ConfigurationError,
    DataError,
    DeviceError,
    NonFiniteError,
    TfdistError,
    UnsupportedModelError,
)

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
LABELS = np.arange(12) % 3


def network() -> keras.Sequential:
    return keras.Sequential([keras.Input((4,)), layers.Dense(3)])


def build() -> keras.Model:
    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def fit(build_model: Any = build, x: Any = X, y: Any = LABELS, **options: Any) -> tfdist.Trainer:
    trainer = tfdist.Trainer(build_model, devices=2, **options)
    trainer.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    return trainer


def test_all_errors_are_of_one_family_and_of_pythons_own() -> None:
    families = {
        ConfigurationError: ValueError,
        DataError: ValueError,
        DeviceError: RuntimeError,
        NonFiniteError: ArithmeticError,
        UnsupportedModelError: TypeError,
    }
    for error, builtin in families.items():
        assert issubclass(error, TfdistError)
        assert issubclass(error, builtin)


def test_unknown_strategy_lists_the_names() -> None:
    with pytest.raises(ConfigurationError, match="mirrored, central_storage, towers"):
        tfdist.Trainer(build, strategy="mirorred")


def test_option_of_another_strategy() -> None:
    with pytest.raises(ConfigurationError, match="'mirrored' takes no option 'parameter_device'"):
        tfdist.strategies.create("mirrored", 2, parameter_device="CPU:0")


def test_more_devices_than_there_are() -> None:
    with pytest.raises(DeviceError, match=r"64 logical CPU devices .*configure\(64\) before"):
        tfdist.Trainer(build, devices=64)
    with pytest.raises(DeviceError, match="No device GPU:7 here: there are CPU:0"):
        tfdist.Trainer(build, devices=["GPU:7"])


def test_batch_smaller_than_the_replicas() -> None:
    trainer = tfdist.Trainer(build, devices=3)
    with pytest.raises(DataError, match=r"batch of 2 rows .* batch_size=3 or more"):
        trainer.fit(X, LABELS, batch_size=2, verbose=0)


@pytest.mark.parametrize("labels", [np.zeros((12, 2)), np.zeros((12, 5, 1))])
def test_labels_of_a_shape_that_does_not_fit(labels: np.ndarray) -> None:
    with pytest.raises(DataError, match="do not fit the model") as caught:
        fit(y=labels)
    assert str(labels.shape[1:])[1:-1].rstrip(",") in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_label_out_of_range() -> None:
    with pytest.raises(DataError, match="label value of 7 which is outside"):
        fit(y=np.full(12, 7))


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (LABELS[:5], "Data cardinality is ambiguous"),
        (LABELS.astype("str"), "cannot be read: Invalid dtype"),
        (None, "do not fit the model: .* y None"),
    ],
)
def test_labels_that_are_no_labels(labels: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        fit(y=labels)


def test_inputs_of_a_shape_that_does_not_fit() -> None:
    with pytest.raises(DataError, match=r"expected axis -1 of input shape to have value 4"):
        fit(x=X[:, :2])


def no_rows(kind: str) -> Any:
    data = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(4)
    if kind == "generator":
        return (batch for batch in [])
    return data.take(0) if kind == "known length" else data.filter(lambda *_: False)


@pytest.mark.parametrize("kind", ["generator", "known length", "unknown length"])
def test_no_data(kind: str) -> None:
    trainer = tfdist.Trainer(build, devices=2)
    for call in (trainer.fit, trainer.evaluate, trainer.predict):
        with pytest.raises(DataError, match=r"hold no batch: check|at least one batch"):
            call(no_rows(kind), verbose=0)


def test_no_rows() -> None:
    with pytest.raises(DataError, match="hold no batch: check the data set"):
        fit(x=X[:0], y=LABELS[:0])


def test_data_of_no_kind() -> None:
    with pytest.raises(
        DataError, match=r"Unrecognized data type[\s\S]*Pass what keras\.Model\.fit"
    ):
        fit(x=object(), y=None)


def test_nan_in_the_first_batch() -> None:
    x = X.copy()
    x[1, 2] = np.nan
    with pytest.raises(NonFiniteError, match="1 values of a batch are NaN"):
        fit(x=x)


def test_a_loss_of_nan_from_data_that_are_finite() -> None:
    def build_model() -> keras.Model:
        model = network()
        model.compile("sgd", lambda y_true, y_pred: keras.ops.log(-keras.ops.abs(y_pred) - 1.0))
        return model

    with pytest.raises(NonFiniteError, match=r"data are finite, .* check the loss"):
        fit(build_model, y=X[:, :3])


def test_a_callback_that_minds_nan_goes_first() -> None:
    trainer = tfdist.Trainer(build, devices=2)
    stop = keras.callbacks.TerminateOnNaN()
    history = trainer.fit(X * np.nan, LABELS, batch_size=4, verbose=0, callbacks=[stop])
    assert np.isnan(history.history["loss"]).all()


def test_fit_of_an_uncompiled_model() -> None:
    with pytest.raises(ConfigurationError, match=r"call model\.compile"):
        fit(network)


def test_a_model_built_before_is_rebuilt_with_its_weights() -> None:
    model = build()
    trainer = tfdist.Trainer(model, devices=2)
    assert trainer.model is not model
    for mine, given in zip(trainer.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, given)
    with pytest.warns(UserWarning, match="rebuilt there with its weights"):
        tfdist.Trainer(lambda: model, devices=2)


def test_optimizer_of_another_trainer() -> None:
    optimizer = keras.optimizers.SGD()

    def shared() -> keras.Model:
        model = network()
        model.compile(optimizer, "mse")
        return model

    first = tfdist.Trainer(shared, strategy="one_device")
    with pytest.raises(ConfigurationError, match="create the optimizer inside build_model"):
        tfdist.Trainer(shared, strategy="one_device")
    assert first.model.optimizer is optimizer


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class OwnTest(keras.Sequential):
    def test_step(self, data: Any) -> Any:
        return super().test_step(data)


class Unbuildable(keras.Model):
    def call(self, inputs: Any) -> Any:
        raise ZeroDivisionError("no way to build this")


@pytest.mark.parametrize(
    ("layers_", "cls", "says"),
    [
        (network().layers, OwnStep, "OwnStep overrides train_step, .* override compute_loss"),
        (network().layers, OwnTest, "OwnTest overrides test_step"),
        (None, Unbuildable, "cannot be built from the data's shapes"),
    ],
)
def test_models_that_replicas_cannot_train(layers_: Any, cls: type, says: str) -> None:
    def build_model() -> keras.Model:
        model = cls([keras.Input((4,)), layers.Dense(3)]) if layers_ else cls()
        model.compile("sgd", "mse")
        return model

    with pytest.raises(UnsupportedModelError, match=says):
        fit(build_model)


def test_accumulation_has_no_moments_of_the_whole_batch() -> None:
    with pytest.raises(ConfigurationError, match="leave one of the two out"):
        tfdist.Trainer(build, devices=2, accumulate=2, sync_batch_norm=True)


def test_accumulation_has_no_loss_of_the_whole_batch() -> None:
    def build_model() -> keras.Model:
        model = network()
        model.compile("sgd", lambda y_true, y_pred: keras.ops.std(y_true - y_pred))
        return model

    with pytest.raises(UnsupportedModelError, match=r"sees whole batches .* use accumulate=1"):
        fit(build_model, y=X[:, :3], accumulate=2)


class AddsSquaredSum(layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(keras.ops.sum(inputs) ** 2)
        return inputs


def test_added_loss_that_is_neither_mean_nor_sum() -> None:
    def build_model() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), AddsSquaredSum(), layers.Dense(3)])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(UnsupportedModelError, match=r"neither a mean nor a sum .* compute_loss"):
        fit(build_model, y=X[:, :3])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accumulate": 0}, "accumulate=0: expected a number from 1"),
        ({"accumulate": "2"}, "accumulate='2': expected a number from 1"),
        ({"strategy": None}, "strategy=None: expected a tfdist Strategy or one of the names"),
        ({"strategy": tf.distribute.get_strategy()}, "expected a tfdist Strategy or one of"),
        ({"strategy": tfdist.strategies.Strategy()}, "devices go to the strategy"),
        ({"strategy": "one_device"}, "computes on one, but got CPU:0, CPU:1: name one"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        fit(**options)


def test_precision_comes_too_late_for_a_built_model() -> None:
    with pytest.raises(ConfigurationError, match="pass the function that builds it"):
        tfdist.Trainer(build(), devices=2, precision="mixed_float16")


@pytest.mark.parametrize("strategy", ["central_storage", "towers"])
def test_xla_is_left_out_where_it_cannot_be(strategy: str) -> None:
    def build_model() -> keras.Model:
        model = network()
        model.compile("sgd", "mse", jit_compile=True)
        return model

    with pytest.warns(UserWarning, match="jit_compile=True is left out"):
        fit(build_model, y=X[:, :3], strategy=strategy)


def test_xla_and_an_exchange_in_the_forward_pass() -> None:
    def build_model() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(3)])
        model.compile("sgd", "mse", jit_compile=True)
        return model

    with pytest.raises(ConfigurationError, match="compile it with jit_compile=False"):
        fit(build_model, y=X[:, :3], sync_batch_norm=True)


STARTED = """
import tensorflow as tf
tf.constant(1) + 1
import tfdist
from tests.support import ROOT
from tests.test_trainer_errors import X, LABELS, build
try:
    tfdist.Trainer(build, devices=2)
except tfdist.errors.DeviceError as error:
    print("refused:", error)
trainer = tfdist.Trainer(build)
trainer.fit(X, LABELS, batch_size=4, verbose=0)
print("replicas:", trainer.strategy.num_replicas)
"""


def test_tensorflow_started_before_the_devices_were_made(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text("import tfdist.errors\n" + STARTED)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "refused: 2 logical CPU devices were asked for" in done.stdout
    assert "call tfdist.devices.configure(2) before the first" in done.stdout
    assert "Going on with 1" in done.stderr
    assert "replicas: 1" in done.stdout
