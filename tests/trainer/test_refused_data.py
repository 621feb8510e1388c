"""Data for which the trainer raises: the message names the value and the fix."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.support.classifier import LABELS, X, build, fit, network
from tfdist.errors import ConfigurationError, DataError, NonFiniteError


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
