"""Mirrored variables: visible only to replicas, and initially equal."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.support.training import X, Y, assert_close, build
from tfdist import devices
from tfdist.strategies import mirrored_variables
from tfdist.strategies.mirrored import Mirrored
from tfdist.trainer import Trainer

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:1"


@pytest.fixture
def variable() -> keras.Variable:
    devices.configure(2)
    made = keras.Variable(np.ones(2, "float32"))
    mirrored_variables.sync([made], [DEVICE])
    return made


def test_replicas_get_their_own_variable(variable: keras.Variable) -> None:
    plain, copy = variable.value, mirrored_variables.copies_of(variable.value)[DEVICE]
    assert copy.device == DEVICE
    with mirrored_variables.read_local():
        assert variable.value is plain
        with mirrored_variables.on_device(DEVICE):
            assert variable.value is copy
            variable.assign([2.0, 3.0])
        assert variable.value is plain
    np.testing.assert_array_equal(variable, [1.0, 1.0])
    np.testing.assert_array_equal(copy, [2.0, 3.0])
    mirrored_variables.sync([variable], [DEVICE])
    np.testing.assert_array_equal(copy, [1.0, 1.0])


def test_error_restores_the_variable(variable: keras.Variable) -> None:
    plain = variable.value
    with (
        pytest.raises(KeyboardInterrupt),
        mirrored_variables.read_local(),
        mirrored_variables.on_device(DEVICE),
    ):
        raise KeyboardInterrupt
    assert variable.value is plain
    with mirrored_variables.read_local():
        assert variable.value is plain


def test_optimizer_recognizes_a_mirrored_variable() -> None:
    model = build(keras.optimizers.Adam())
    model.optimizer.build(model.trainable_variables)
    mirrored_variables.sync(model.variables, [DEVICE])
    for number, weight in enumerate(model.trainable_variables):
        copy = mirrored_variables.copies_of(weight.value)[DEVICE]
        assert model.optimizer._get_variable_index(copy) == number


def test_other_strategies_ignore_mirrored_variables() -> None:
    model = build()
    Trainer(lambda: model, "mirrored", devices=2).fit(X, Y, verbose=0)
    model.set_weights([2 * weight for weight in model.get_weights()])
    other = Trainer(lambda: model, Mirrored("CPU:1"))
    assert_close(other.predict(X, verbose=0), model.predict(X, verbose=0))
