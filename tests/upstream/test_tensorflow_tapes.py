"""A user's tape gives gradients of weights in parts as of others."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.sharded.division import OverDevices
from tfdist.strategies.tensor_parallel.splits import AlongAxis
from tfdist.upstream.keras_variables import divide
from tfdist.upstream.tensorflow_tapes import know_parts


@pytest.mark.parametrize("division", [AlongAxis(0, [2, 1]), OverDevices(2)])
def test_a_tape_of_the_user_s_own(division: Any) -> None:
    know_parts()
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    x = tf.reshape(tf.range(6.0), (2, 3))

    def gradients() -> list:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x) ** 2)
        unused = keras.Variable(1.0)
        found = tape.gradient(loss, [layer.kernel, layer.bias.value, x, unused])
        assert found.pop() is None
        return [keras.ops.convert_to_numpy(gradient) for gradient in found]

    wanted = gradients()
    divide(layer.kernel, division, ["CPU:0", "CPU:1"], keep_whole=False)
    for one, other in zip(gradients(), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(x) ** 2)
    np.testing.assert_allclose(tape.gradient(loss, layer.kernel.value), wanted[0], rtol=1e-6)
