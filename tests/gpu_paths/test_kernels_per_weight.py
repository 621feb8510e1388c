"""Kernels of a step: few per weight, and those of the gradients of biases."""

from __future__ import annotations

import collections
import functools
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.gpu_paths.kernel_coverage import gpus_listed
from tests.gpu_paths.step_graph import step_graphs
from tests.support.training import building
from tfdist.strategies.one_device import OneDevice
from tfdist.upstream.tensorflow_runtime import gradients_of_biases_as_products

_sgd = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
#: Operations by which overflows are looked for and gradients are unscaled.
_OF_SCALING = ("IsFinite", "All", "RealDiv", "SelectV2", "ConcatV2")
#: The weights of a layer of `operations`: a kernel, a bias, gamma and beta.
_WEIGHTS_PER_LAYER = 4


def operations(num_layers: int) -> collections.Counter[str]:
    """Returns the number of operations of each type in a step with loss scaling."""

    def build_layers() -> list[Any]:
        kinds = (lambda: layers.Conv2D(8, 1), layers.BatchNormalization) * num_layers
        as_image = [keras.Input((4,)), layers.Reshape((2, 2, 1))]
        return [*as_image, *(make() for make in kinds), layers.Flatten(), layers.Dense(1)]

    build = building(build_layers, optimizer=_sgd)
    graphs = step_graphs(OneDevice(), build, precision="mixed_float16")
    return collections.Counter(node.op for node in graphs.nodes())


def test_weights_are_updated_by_one_operation_and_checked_together() -> None:
    few, many = operations(1), operations(3)
    assert {kind: many[kind] - few[kind] for kind in _OF_SCALING} == dict.fromkeys(_OF_SCALING, 0)
    kind = "ResourceApplyKerasMomentum"
    assert many[kind] - few[kind] == 2 * _WEIGHTS_PER_LAYER
    assert many["AssignAddVariableOp"] == few["AssignAddVariableOp"]


def test_schedule_is_evaluated_once_and_before_the_backward_pass() -> None:
    class Schedule(keras.optimizers.schedules.ExponentialDecay):
        def __call__(self, step: Any) -> Any:
            return tf.identity(super().__call__(step), name="scheduled")

    optimizer = functools.partial(
        keras.optimizers.AdamW, Schedule(0.1, 2, 0.5), weight_decay=0.1, global_clipnorm=1.0
    )
    build = building(lambda: [keras.Input((4,)), layers.Dense(3), layers.Dense(1)], optimizer)
    traced = list(step_graphs(OneDevice(), build).traced_nodes())
    (rate,) = (node for node in traced if node.name.endswith("scheduled"))
    by_name = {node.name: node for node in traced}
    waiting, before = [rate], set()
    while waiting:
        for name in waiting.pop().input:
            source = name.lstrip("^").split(":")[0]
            if source in by_name and source not in before:
                before.add(source)
                waiting.append(by_name[source])
    assert any("ReadVariableOp" in name for name in before)
    assert not any("MatMul" in name for name in before)


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
@pytest.mark.parametrize("shape", [(6, 3), (2, 5, 4, 3), (300, 100, 3)])
def test_gradients_of_biases_are_sums_in_float32(shape: tuple[int, ...], dtype: str) -> None:
    upstream = tf.constant(np.random.default_rng(0).normal(size=shape), dtype)

    @tf.function
    def gradient() -> tf.Tensor:
        bias = tf.zeros([3], dtype)
        with tf.GradientTape() as tape:
            tape.watch(bias)
            biased = tf.nn.bias_add(tf.zeros(shape, dtype), bias)
        return tape.gradient(biased, bias, upstream)

    expected = tf.reduce_sum(tf.cast(upstream, tf.float32), range(len(shape) - 1))
    with gradients_of_biases_as_products():
        result = tf.function(gradient.python_function)()
    assert result.dtype == dtype
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2, "float32": 1e-5}[dtype]
    np.testing.assert_allclose(tf.cast(result, tf.float32), expected, tolerance, 1e-3)
