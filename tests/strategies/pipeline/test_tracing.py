"""Which calls of a layer belong to a micro-batch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.pipeline.schedule import Order, Pass
from tfdist.strategies.pipeline.tracing import Tracing


def test_probe_is_not_a_micro_batch() -> None:
    """Both share an input tensor, which a stage must not capture from the probe's graph."""
    layer, added = keras.layers.Add(), tf.ones([2])
    devices: list[str] = []

    def computed(tracing: Tracing, x: Any) -> Any:
        total = tracing.call(lambda operation, x: operation(x), layer, [x, added])
        devices.append(total.device)
        return total

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        order = Order("gpipe", 2, 2)
        tracing = Tracing({layer: [1]}, ["CPU:0", "CPU:1"], order, lambda: 0)
        first = computed(tracing, x)
        with tf.init_scope():
            probe = tf.function(lambda x: computed(tracing, x), autograph=False)
            assert float(tf.reduce_sum(probe(tf.zeros([2])))) == 2.0
        assert order.before(Pass(1, 1, "forward"))[0] is first
        return computed(tracing, x)

    assert float(tf.reduce_sum(step(tf.zeros([2])))) == 2.0
    assert [place[-5:] for place in devices] == ["CPU:1", "", "CPU:1"]
