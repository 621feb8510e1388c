"""Optimizer updates by TensorFlow's training kernels: one operation per weight.

Keras writes an update as arithmetic and assignments: 4 operations for SGD with momentum, more than
20 for Adam. Each reads and writes memory, and on a GPU each is a kernel that the host has to queue.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf
from keras import ops

#: `update(gradient, variable, learning_rate)`, as the `update_step` of a Keras optimizer.
Update = Callable[[Any, tf.Variable, Any], None]

#: Adam's kernel for CPUs starts threads for more than a few elements. Below this number of
#: elements, that takes longer than Keras's operations.
_LEAST_FOR_CPU_THREADS = 1 << 15


def update_function(optimizer: keras.optimizers.Optimizer) -> Update:
    """Returns a function that updates one weight, for the updates of one step in one graph.

    The result is that of Keras's `update_step`: bitwise identical for SGD on CPUs, and otherwise
    equal within rounding. Adam's kernel computes `1 - beta` in the dtype of the weight and Keras in
    float64, so that updates of float32 weights differ by up to 3e-5 of their size.

    Args:
        optimizer: A built optimizer. Any except SGD and Adam, or classes that inherit their
            `update_step`, returns its own `update_step`.
    """
    kernels = _KERNELS.get(getattr(optimizer.update_step, "__func__", None))
    if kernels is None:
        return optimizer.update_step
    by_kernel = kernels(optimizer)

    def update(gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        sparse = isinstance(gradient, tf.IndexedSlices)
        if sparse or variable.dtype not in (tf.float32, tf.float64):
            optimizer.update_step(gradient, variable, learning_rate)
        else:
            gradient, rate = (tf.cast(v, variable.dtype) for v in (gradient, learning_rate))
            by_kernel(gradient, variable, rate)

    return update


def _sgd(optimizer: keras.optimizers.SGD) -> Update:
    def update(gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
        if not optimizer.momentum:
            tf.raw_ops.ResourceApplyGradientDescent(
                var=_handle(variable), alpha=rate, delta=gradient, use_locking=True
            )
            return
        velocity = optimizer.momentums[optimizer._get_variable_index(variable)]
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=_handle(variable),
            accum=_handle(velocity.value),
            lr=rate,
            grad=gradient,
            momentum=ops.cast(optimizer.momentum, variable.dtype),
            use_locking=True,
            use_nesterov=optimizer.nesterov,
        )

    return update


def _adam(optimizer: keras.optimizers.Adam) -> Update:
    @functools.cache
    def bias_corrections(device: str, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns `beta ** step` of both betas, computed once per step for each device."""
        step = tf.cast(optimizer.iterations + 1, dtype)
        betas = optimizer.beta_1, optimizer.beta_2
        return tuple(ops.power(ops.cast(beta, dtype), step) for beta in betas)

    def update(gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor) -> None:
        on_gpu = tf.DeviceSpec.from_string(variable.device).device_type == "GPU"
        if optimizer.amsgrad or not (on_gpu or math.prod(variable.shape) >= _LEAST_FOR_CPU_THREADS):
            optimizer.update_step(gradient, variable, rate)
            return
        index, dtype = optimizer._get_variable_index(variable), variable.dtype
        beta_1_power, beta_2_power = bias_corrections(variable.device, dtype)
        tf.raw_ops.ResourceApplyAdam(
            var=_handle(variable),
            m=_handle(optimizer._momentums[index].value),
            v=_handle(optimizer._velocities[index].value),
            beta1_power=beta_1_power,
            beta2_power=beta_2_power,
            lr=rate,
            beta1=tf.constant(optimizer.beta_1, dtype),
            beta2=tf.constant(optimizer.beta_2, dtype),
            epsilon=tf.constant(optimizer.epsilon, dtype),
            grad=gradient,
            use_locking=True,
        )

    return update


def _handle(variable: tf.Variable) -> tf.Tensor:
    """Returns a variable's handle. The graph notes who uses the variable, as `assign` does."""
    graph = tf.compat.v1.get_default_graph()
    if isinstance(graph, tf.__internal__.FuncGraph):
        graph.watch_variable(variable)
    return variable.handle


_KERNELS: MappingProxyType[Any, Callable[[Any], Update]] = MappingProxyType(
    {keras.optimizers.SGD.update_step: _sgd, keras.optimizers.Adam.update_step: _adam}
)
