"""Layers that wait instead of computing, so that devices overlap on any number of cores.

A device runs operations one after the other, like a stream of a GPU.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

#: Threads for TensorFlow's operations: each operation that waits occupies one.
NUM_THREADS = 32


class _Stream:
    """The queue of a device."""

    def __init__(self) -> None:
        self._lock, self._free_at = threading.Lock(), 0.0

    def hold(self, seconds: float) -> None:
        """Waits for all earlier calls, and then for `seconds`.

        A call that came in time begins when the device is free, not when its thread wakes up.
        """
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + seconds
            mine = self._free_at
        time.sleep(max(0.0, mine - time.perf_counter()))


_streams: dict[str, _Stream] = collections.defaultdict(_Stream)


class Waits(keras.layers.Layer):
    """Multiplies by a weight and occupies its device; twice as long in the backward pass.

    Args:
        row_ms: Milliseconds for each row of the forward pass.
        waits_apart: Whether the gradients of the inputs and of the weight wait apart, each for half
            of the backward pass.
    """

    def __init__(self, row_ms: float, waits_apart: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.row_ms, self.waits_apart = row_ms, waits_apart

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(), initializer="ones", name="weight")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of the shape of `inputs`, [rows, features]."""
        hold = functools.partial(_hold, _streams[tf.identity(inputs).device])

        @tf.custom_gradient
        def held(values: tf.Tensor, weight: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            def back(gradient: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                if self.waits_apart:
                    of_values = hold(gradient, self.row_ms) * weight
                    return of_values, tf.reduce_sum(hold(gradient * values, self.row_ms))
                gradient = hold(gradient, 2 * self.row_ms)
                return gradient * weight, tf.reduce_sum(gradient * values)

            return hold(values * weight, self.row_ms), back

        return held(inputs, tf.convert_to_tensor(self.weight))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


def _hold(stream: _Stream, values: tf.Tensor, row_ms: float) -> tf.Tensor:
    def wait(value: np.ndarray, num_rows: np.ndarray) -> np.ndarray:
        stream.hold(int(num_rows) * row_ms / 1e3)
        return value

    def waited(value: tf.Tensor, num_rows: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(wait, [value, num_rows], tf.float32)

    # An element of the values, so that the wait begins when they are there.
    args = [tf.reshape(values, [-1])[0], tf.shape(values)[0]]
    if tf.executing_eagerly():
        waited(*args)
        return tf.identity(values)
    with tf.init_scope(), tf.device(None):
        specs = tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int32)
        call = tf.function(waited, autograph=False).get_concrete_function(*specs)
    # As a stateless call: stateful operations wait for each other, even on different devices. As a
    # control dependency: the row analysis cannot follow Python functions.
    call.add_to_graph(tf.compat.v1.get_default_graph())
    with tf.control_dependencies(tf.raw_ops.PartitionedCall(args=args, Tout=[tf.float32], f=call)):
        return tf.identity(values)


def network(num_layers: int, row_ms: float, waits_apart: bool = False) -> keras.Model:
    """Returns a compiled model of layers with equal cost.

    Args:
        num_layers: Number of layers.
        row_ms: Milliseconds for each row, of all layers and both passes together.
        waits_apart: As for `Waits`.
    """
    parts = [Waits(row_ms / 3 / num_layers, waits_apart) for _ in range(num_layers)]
    model = keras.Sequential([keras.Input((1,)), *parts])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model
