"""A variable cut along one of its axes, a slice a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.placement import copied_slices


class AlongAxis:
    """Slices, all of them in this process; see `ShardedVariable`.

    Args:
        axis: Along which.
        sizes: Of the slices there.
    """

    reads_parts, has_all = True, True

    def __init__(self, axis: int, sizes: Sequence[int]) -> None:
        self.axis, self.sizes = axis, list(sizes)

    def __eq__(self, other: object) -> bool:
        own = (self.axis, self.sizes)
        return isinstance(other, AlongAxis) and own == (other.axis, other.sizes)

    def __hash__(self) -> int:
        return hash((self.axis, *self.sizes))

    def cut(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """Returns all slices."""
        return copied_slices(whole, self.axis, self.sizes)

    def join(self, parts: Sequence[Any], shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
        """Returns the whole, on the device that asks."""
        whole = tf.concat([tf.convert_to_tensor(part) for part in parts], self.axis)
        return tf.cast(tf.ensure_shape(whole, shape), dtype)

    def agreed(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value: no other process has a part."""
        return value

    def add_up(self, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the numbers: no other process has a part."""
        return numbers
