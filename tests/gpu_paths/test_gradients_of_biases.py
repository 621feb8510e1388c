"""On hosts with GPUs, gradients of biases in half precision are sums in float32."""

from __future__ import annotations

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.gpu_paths.kernel_coverage import gpus_listed
from tests.gpu_paths.step_graph import step_graphs
from tests.support.training import building
from tfdist.strategies.one_device import OneDevice
from tfdist.upstream.tensorflow_kernels import gradients_of_biases_as_sums

build = building(
    lambda: [
        keras.Input((4, 4, 3)),
        layers.Conv2D(4, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(5),
    ],
    optimizer="sgd",
)


@pytest.mark.parametrize(
    ("precision", "has_gpus", "is_sum"),
    [("mixed_float16", True, True), ("float32", True, False), ("mixed_float16", False, False)],
)
def test_kernel_is_replaced_in_half_precision(precision: str, has_gpus: bool, is_sum: bool) -> None:
    x, y = np.zeros((8, 4, 4, 3), "float32"), np.zeros((8, 5), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    with gpus_listed() if has_gpus else nullcontext():
        graphs = step_graphs(OneDevice("CPU:1"), build, data, precision=precision)
    assert ("BiasAddGrad" in {node.op for node in graphs.traced_nodes()}) != is_sum


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(6, 3), (2, 5, 4, 3)])
def test_gradient_is_that_of_tensorflow(shape: tuple[int, ...], dtype: str) -> None:
    upstream = tf.constant(np.random.default_rng(0).normal(size=shape), dtype)

    @tf.function
    def gradient() -> tf.Tensor:
        bias = tf.zeros([3], dtype)
        with tf.GradientTape() as tape:
            tape.watch(bias)
            biased = tf.nn.bias_add(tf.zeros(shape, dtype), bias)
        return tape.gradient(biased, bias, upstream)

    expected = gradient()
    with gradients_of_biases_as_sums():
        found = tf.function(gradient.python_function)()
    assert found.dtype == expected.dtype
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-6}[dtype]
    np.testing.assert_allclose(
        tf.cast(found, tf.float32), tf.cast(expected, tf.float32), rtol=tolerance, atol=tolerance
    )
