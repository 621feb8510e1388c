"""How many bytes of variables each device holds."""

from __future__ import annotations

from collections.abc import Iterable

import keras
import tensorflow as tf

from tfdist.strategies import copies
from tfdist.upstream.keras_variables import ShardedVariable


def by_device(variables: Iterable[keras.Variable]) -> dict[str, int]:
    """Returns the bytes of variables, of their parts and copies, by the short name of a device."""
    held: dict[str, int] = {}
    for variable in variables:
        for own in tensors_of(variable):
            device = tf.DeviceSpec.from_string(own.device)
            name = f"{device.device_type}:{device.device_index}"
            held[name] = held.get(name, 0) + own.shape.num_elements() * own.dtype.size
    return held


def tensors_of(variable: keras.Variable) -> list[tf.Variable]:
    """Returns the TensorFlow variables that a Keras variable stands for in this process."""
    is_cut = isinstance(variable, ShardedVariable)
    parts = variable.parts if is_cut else []
    if is_cut and not variable.is_whole:
        return parts
    return [variable.value, *copies_of(variable), *parts]


def copies_of(variable: keras.Variable) -> list[tf.Variable]:
    """Returns those of them that are copies of a whole variable."""
    if isinstance(variable, ShardedVariable) and not variable.is_whole:
        return []
    return list(copies.of(variable.value).values())
