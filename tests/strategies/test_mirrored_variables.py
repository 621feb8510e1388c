"""Mirrored variables, and slices that must not be views of larger tensors."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import create_autospec

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.training import X, Y, assert_close, build
from tfdist import devices
from tfdist.strategies import mirrored_variables
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.sharded.division import OverDevices, OverProcesses
from tfdist.strategies.sharded.rank0_coordinator import Rank0Coordinator
from tfdist.strategies.tensor_parallel.splits import AlongAxis
from tfdist.trainer import Trainer
from tfdist.upstream.keras_variables import Division

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


def over_processes(rank: int) -> Division:
    coordinator = create_autospec(Rank0Coordinator, instance=True)
    coordinator.group = SimpleNamespace(rank=rank, size=2)
    return OverProcesses(256, coordinator, list)


@pytest.mark.parametrize(
    ("division", "shape"),
    [
        (OverDevices(2), (128,)),
        (over_processes(0), (128,)),
        (over_processes(1), (128,)),
        (AlongAxis(0, [8, 8]), (8, 16)),
        (AlongAxis(1, [8, 8]), (16, 8)),
    ],
)
def test_slice_does_not_keep_the_tensor_in_memory(
    division: Division, shape: tuple[int, ...]
) -> None:
    """A view would, in a variable that it is assigned to or in a sum that reuses its buffer."""
    whole = tf.reshape(tf.range(256.0), [16, 16])  # its halves are aligned in memory
    parts = division.cut(whole)
    assert {tuple(part.shape) for part in parts} == {shape}
    assert not any(np.shares_memory(*map(np.from_dlpack, (whole, part))) for part in parts)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_match_tensorflow(axis: int) -> None:
    whole = tf.reshape(tf.range(64.0), [4, 4, 4])
    expected = tf.split(whole, [1, 3], axis)
    for part, own in zip(AlongAxis(axis, [1, 3]).cut(whole), expected, strict=True):
        np.testing.assert_array_equal(part, own)
