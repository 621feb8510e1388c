"""A user's `tf.GradientTape` returns gradients of sharded weights, without any patch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.strategies.sharded.division import OverDevices
from tfdist.strategies.tensor_parallel.splits import AlongAxis
from tfdist.upstream.keras_variables import divide


@pytest.mark.parametrize("division", [AlongAxis(0, [2, 1]), OverDevices(2)])
def test_user_tape_gets_gradients_of_sharded_weights(division: Any) -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    x = tf.reshape(tf.range(6.0), (2, 3))

    def gradients() -> list:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x) ** 2)
        unused = keras.Variable(1.0)
        result = tape.gradient(loss, [layer.kernel, layer.bias.value, x, unused])
        assert result.pop() is None
        return [keras.ops.convert_to_numpy(gradient) for gradient in result]

    wanted = gradients()
    divide(layer.kernel, division, ["CPU:0", "CPU:1"], keep_whole=False)
    for one, other in zip(gradients(), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x) ** 2)
    np.testing.assert_allclose(tape.gradient(loss, layer.kernel.value), wanted[0], rtol=1e-6)
    traced = tf.function(lambda x: layer(x), autograph=False)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(traced(x) ** 2)
        np.testing.assert_allclose(tape.gradient(loss, layer.kernel), wanted[0], rtol=1e-6)

    @tf.function(autograph=False)
    def within() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(loss, layer.kernel.value)

    np.testing.assert_allclose(within(), wanted[0], rtol=1e-6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(x)
    assert tape.gradient(loss, layer.kernel) is None


def test_shards_of_other_processes_raise() -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    division = OverDevices(2)
    division.has_all = False
    divide(layer.kernel, division, ["CPU:0", "CPU:1"], keep_whole=False)
    for source in (layer.kernel, layer.kernel.value):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.ones((1, 3))))
        with pytest.raises(UnsupportedModelError, match=r"train with trainer\.fit"):
            tape.gradient(loss, source)
