"""Optimizer updates by TensorFlow's training kernels: one operation per weight.

Keras writes an update as arithmetic and assignments: 4 operations for SGD with momentum, more than
20 for Adam. Each reads and writes memory, and on a GPU each is a kernel that the host has to queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdist.upstream.keras_model import redefined

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
    make = _KERNELS.get(getattr(optimizer.update_step, "__func__", None))
    is_changed = redefined(optimizer, "assign", "assign_add", "assign_sub", "iterations")
    if make is None or is_changed or not make.has_constants(optimizer):
        return optimizer.update_step
    kernel = make(optimizer)

    def update(gradient: Any, variable: tf.Variable, learning_rate: Any) -> None:
        slots = kernel.slots(optimizer._get_variable_index(variable))
        if (
            isinstance(gradient, tf.IndexedSlices)
            or variable.dtype not in (tf.float32, tf.float64)
            or any(slot.device != variable.device for slot in slots)
            or not kernel.suits(variable)
        ):
            optimizer.update_step(gradient, variable, learning_rate)
            return
        gradient, rate = (tf.cast(v, variable.dtype) for v in (gradient, learning_rate))
        kernel.update([_handle(v) for v in (variable, *slots)], gradient, rate)

    return update


class _SGD:
    """The kernels of `keras.optimizers.SGD`: with momentum, of any kind, or without."""

    def __init__(self, optimizer: keras.optimizers.SGD) -> None:
        self._optimizer = optimizer

    @staticmethod
    def has_constants(optimizer: keras.optimizers.SGD) -> bool:
        """Returns whether the hyperparameters are numbers, and not variables."""
        return isinstance(optimizer.momentum, (int, float))

    def slots(self, index: int) -> list[tf.Variable]:
        """Returns the variables that the kernel updates together with a weight."""
        return [self._optimizer.momentums[index].value] if self._optimizer.momentum else []

    def suits(self, variable: tf.Variable) -> bool:
        """Returns whether the kernel is the better choice for a weight."""
        return True

    def update(self, handles: list[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor) -> None:
        """Updates a weight and its slots, given their handles."""
        var, *accum = handles
        if not accum:
            tf.raw_ops.ResourceApplyGradientDescent(
                var=var, alpha=rate, delta=gradient, use_locking=True
            )
            return
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=var,
            accum=accum[0],
            lr=rate,
            grad=gradient,
            momentum=ops.cast(self._optimizer.momentum, gradient.dtype),
            use_locking=True,
            use_nesterov=self._optimizer.nesterov,
        )


class _Adam:
    """The kernel of `keras.optimizers.Adam` and `AdamW`, with the methods of `_SGD`."""

    def __init__(self, optimizer: keras.optimizers.Adam) -> None:
        self._optimizer = optimizer
        self._powers: dict[tuple[str, tf.DType], list[tf.Tensor]] = {}

    @staticmethod
    def has_constants(optimizer: keras.optimizers.Adam) -> bool:
        values = optimizer.beta_1, optimizer.beta_2, optimizer.epsilon
        return all(isinstance(value, (int, float)) for value in values)

    def slots(self, index: int) -> list[tf.Variable]:
        return [v[index].value for v in (self._optimizer._momentums, self._optimizer._velocities)]

    def suits(self, variable: tf.Variable) -> bool:
        on_gpu = tf.DeviceSpec.from_string(variable.device).device_type == "GPU"
        is_large = math.prod(variable.shape) >= _LEAST_FOR_CPU_THREADS
        return not self._optimizer.amsgrad and (on_gpu or is_large)

    def update(self, handles: list[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor) -> None:
        (var, m, v), dtype = handles, gradient.dtype
        if (var.device, dtype) not in self._powers:
            step = tf.cast(self._optimizer.iterations + 1, dtype)
            betas = self._optimizer.beta_1, self._optimizer.beta_2
            self._powers[var.device, dtype] = [ops.power(ops.cast(b, dtype), step) for b in betas]
        beta_1_power, beta_2_power = self._powers[var.device, dtype]
        tf.raw_ops.ResourceApplyAdam(
            var=var,
            m=m,
            v=v,
            beta1_power=beta_1_power,
            beta2_power=beta_2_power,
            lr=rate,
            beta1=tf.constant(self._optimizer.beta_1, dtype),
            beta2=tf.constant(self._optimizer.beta_2, dtype),
            epsilon=tf.constant(self._optimizer.epsilon, dtype),
            grad=gradient,
            use_locking=True,
        )


def _handle(variable: tf.Variable) -> tf.Tensor:
    """Returns a variable's handle. The graph notes who uses the variable, as `assign` does."""
    graph = tf.compat.v1.get_default_graph()
    if isinstance(graph, tf.__internal__.FuncGraph):
        graph.watch_variable(variable)
    return variable.handle


_KERNELS: MappingProxyType[Any, type[_SGD] | type[_Adam]] = MappingProxyType(
    {keras.optimizers.SGD.update_step: _SGD, keras.optimizers.Adam.update_step: _Adam}
)
