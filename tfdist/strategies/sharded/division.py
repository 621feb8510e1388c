"""How the elements of a variable are divided: among devices of one process, or processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.placement import copied_slice, copied_slices
from tfdist.strategies.sharded.rank0_coordinator import Rank0Coordinator
from tfdist.upstream.keras_variables import ShardedVariable


def sizes(size: int, num_owners: int) -> list[int]:
    """Returns how many of so many elements each owner has: what is over goes to the first."""
    small, over = divmod(size, num_owners)
    return [small + (owner < over) for owner in range(num_owners)]


class OverDevices:
    """A part a device, all of them in this process; see `ShardedVariable`.

    Args:
        num_devices: At most as many as the variables have elements.
    """

    reads_parts, has_all = False, True

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices

    def cut(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """Returns all parts, which are vectors."""
        own = sizes(whole.shape.num_elements(), self._num_devices)
        return copied_slices(tf.reshape(whole, [-1]), 0, own)

    def join(self, parts: Sequence[Any], shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
        """Returns the whole, on the device that asks."""
        sent = []
        for part in parts:
            with tf.device(part.device):
                sent.append(tf.cast(tf.convert_to_tensor(part), dtype))
        return tf.reshape(tf.concat(sent, 0), shape)

    def add_up(self, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the numbers: no other process has a part."""
        return numbers

    def agreed(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value: no other process has a part."""
        return value


class OverProcesses:
    """A part a process, of which this one has its own; see `ShardedVariable`.

    Args:
        size: Elements of the variable, at least one a process.
        rank: Of this process.
        num_processes: That have parts.
        coordinator: Of this process.
        all_reduce: Sums tensors over the processes.
    """

    reads_parts, has_all = False, False

    def __init__(
        self,
        size: int,
        rank: int,
        num_processes: int,
        coordinator: Rank0Coordinator,
        all_reduce: Callable[[list], list],
    ) -> None:
        by_rank = sizes(size, num_processes)
        self._begin, self._end = sum(by_rank[:rank]), sum(by_rank[: rank + 1])
        self._size, self._coordinator, self._all_reduce = size, coordinator, all_reduce
        self._number = coordinator.number()

    def introduce(self, variable: ShardedVariable) -> None:
        """Lets other processes ask for the variable that is divided so."""
        self._coordinator.know(self._number, variable)

    def cut(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """Returns the part of this process, a vector."""
        return [copied_slice(tf.reshape(whole, [-1]), 0, self._begin, self._end)]

    def join(
        self, parts: Sequence[tf.Variable], shape: tf.TensorShape, dtype: tf.DType
    ) -> tf.Tensor:
        """Returns the whole; in the graph of somebody else's function when that runs."""
        (part,), coordinator, number = parts, self._coordinator, self._number
        if coordinator.all_take_part:
            whole = coordinator.joined(number, tf.cast(part, dtype))
        elif tf.executing_eagerly():
            whole = coordinator.read(number, part)
        else:
            whole = tf.py_function(lambda: coordinator.read(number, part), [], part.dtype)
        whole.set_shape([self._size])
        return tf.cast(tf.reshape(whole, shape), dtype)

    def add_up(self, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of numbers over the processes."""
        return self._all_reduce(numbers)

    def agreed(self, value: tf.Tensor) -> tf.Tensor:
        """Returns what rank 0 assigns, which may do so alone."""
        if self._coordinator.all_take_part or not tf.executing_eagerly():
            return value
        return self._coordinator.written(self._number, tf.reshape(value, [-1]))
