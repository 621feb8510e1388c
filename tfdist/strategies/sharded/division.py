"""How the elements of a variable are divided into shards: over devices, or over processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import tensorflow as tf

from tfdist.groups.base import shard_sizes
from tfdist.groups.fusion import FUSION_LIMIT, copied_slice, copied_slices
from tfdist.strategies.sharded.rank0_coordinator import Rank0Coordinator
from tfdist.upstream.keras_variables import ShardedVariable
from tfdist.upstream.tensorflow_graphs import outermost_graph


class OverDevices:
    """A shard for each device of this process: see `ShardedVariable`.

    Args:
        num_devices: At most the number of elements of any variable.
    """

    reads_parts, has_all = False, True

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices

    def cut(self, whole: tf.Tensor | tf.IndexedSlices) -> list[Any]:
        """Returns all shards, which are vectors."""
        sizes = shard_sizes(whole.shape.num_elements(), self._num_devices)
        if isinstance(whole, tf.IndexedSlices):
            return _slices_of_shards(whole, 0, sizes)
        return copied_slices(tf.reshape(whole, [-1]), 0, sizes)

    def join(self, parts: Sequence[Any], shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
        """Returns the full value, on the device that the caller computes on."""
        sent = []
        for part in parts:
            with tf.device(part.device):
                sent.append(tf.cast(tf.convert_to_tensor(part), dtype))
        return tf.reshape(tf.concat(sent, 0), shape)

    def add_up(self, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the numbers: no other process has a shard."""
        return numbers

    def agreed(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value: no other process has a shard."""
        return value


class OverProcesses:
    """A shard for each process, of which this one has its own: see `ShardedVariable`.

    Args:
        size: Elements of the variable, at least one for each process.
        coordinator: Coordinator of this process.
        all_reduce: Sums tensors over the processes.

    Attributes:
        begin: The position of this process's shard in the flattened variable.
        sizes: The number of elements of each process's shard.
        number: The number by which the coordinator knows the variable.
    """

    reads_parts, has_all = False, False

    def __init__(
        self, size: int, coordinator: Rank0Coordinator, all_reduce: Callable[[list], list]
    ) -> None:
        rank = coordinator.group.rank
        self.sizes = shard_sizes(size, coordinator.group.size)
        self.begin, self._end = sum(self.sizes[:rank]), sum(self.sizes[: rank + 1])
        self._size, self._coordinator, self._all_reduce = size, coordinator, all_reduce
        self.number = coordinator.number()

    def introduce(self, variable: ShardedVariable) -> None:
        """Lets other processes ask for the variable that is divided in this way."""
        self._coordinator.know(self.number, variable, self.sizes)

    def cut(self, whole: tf.Tensor | tf.IndexedSlices) -> list[Any]:
        """Returns the shard of this process, a vector."""
        if isinstance(whole, tf.IndexedSlices):
            return _slices_of_shards(whole, self.begin, [self._end - self.begin])
        return [copied_slice(tf.reshape(whole, [-1]), 0, self.begin, self._end)]

    def join(
        self, parts: Sequence[tf.Variable], shape: tf.TensorShape, dtype: tf.DType
    ) -> tf.Tensor:
        """Returns the full value; in the graph of user code, when the graph runs."""
        (part,), coordinator, number = parts, self._coordinator, self.number
        if coordinator.all_take_part:
            whole = coordinator.joined(number, tf.cast(part, dtype), self.sizes)
        elif tf.executing_eagerly():
            whole = coordinator.read(number, part, self.sizes)
        else:
            # Not in the graph of a loop, whose rounds TensorFlow runs concurrently: all ranks have
            # to read in the same order. A loop of user code reads what is there before it starts.
            read = coordinator.read
            with outermost_graph().as_default():
                whole = tf.py_function(lambda: read(number, part, self.sizes), [], part.dtype)
        whole.set_shape([self._size])
        return tf.cast(tf.reshape(whole, shape), dtype)

    def join_together(self, read: Sequence[tuple[ShardedVariable, tf.DType]]) -> list[tf.Tensor]:
        """Returns the full values. In a step, small variables of a dtype share an all-gather."""
        if not self._coordinator.all_take_part:
            return [variable.joined(dtype) for variable, dtype in read]
        divisions = [cast("OverProcesses", variable.division) for variable, _ in read]
        packs: dict[Any, list[int]] = defaultdict(list)
        for index in sorted(range(len(read)), key=lambda index: divisions[index].number):
            variable, dtype = read[index]
            is_small = variable.shape.num_elements() < FUSION_LIMIT
            packs[dtype.name if is_small else index].append(index)
        wholes: dict[int, tf.Tensor] = {}
        for places in packs.values():
            wholes |= zip(places, self._packed([read[index] for index in places]), strict=True)
        return [wholes[index] for index in range(len(read))]

    def _packed(self, read: Sequence[tuple[ShardedVariable, tf.DType]]) -> list[tf.Tensor]:
        """Returns the full values of variables of one dtype, by one all-gather."""
        if len(read) == 1:
            return [variable.joined(dtype) for variable, dtype in read]
        vectors = [tf.cast(variable.parts[0], dtype) for variable, dtype in read]
        divisions = [cast("OverProcesses", variable.division) for variable, _ in read]
        by_rank = [*zip(*(division.sizes for division in divisions), strict=True)]
        # All numbers, so that ranks with different packs wait instead of mixing them up.
        name = "_".join(str(division.number) for division in divisions)
        whole = self._coordinator.joined(name, tf.concat(vectors, 0), [*map(sum, by_rank)])
        pieces = tf.split(whole, [size for of_rank in by_rank for size in of_rank])
        return [
            tf.reshape(tf.concat(pieces[i :: len(read)], 0), variable.shape)
            for i, (variable, _) in enumerate(read)
        ]

    def add_up(self, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of numbers over the processes."""
        return self._all_reduce(numbers)

    def agreed(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value that rank 0 assigns, which may do so alone."""
        if self._coordinator.all_take_part or not tf.executing_eagerly():
            return value
        return self._coordinator.written(self.number, tf.reshape(value, [-1]))


def _slices_of_shards(
    slices: tf.IndexedSlices, begin: int, sizes: Sequence[int]
) -> list[tf.IndexedSlices]:
    """Returns the parts of a sparse gradient that belong to shards next to each other.

    They have a slice for each element of a row, in the order of the rows' slices. Optimizers that
    update each element by itself do the same with them as with the rows.

    Args:
        slices: Slices of rows.
        begin: The position of the first shard in the flattened variable.
        sizes: The number of elements of each shard.
    """
    indices = tf.cast(slices.indices, tf.int64)  # a table may have more elements than int32 counts
    width = tf.constant(slices.shape[1:].num_elements(), tf.int64)
    places = tf.reshape(indices[:, None] * width + tf.range(width), [-1])
    values, slices_of_shards = tf.reshape(slices.values, [-1]), []
    for size in sizes:
        inside = (places >= begin) & (places < begin + size)
        slices_of_shards.append(
            tf.IndexedSlices(values[inside], places[inside] - begin, tf.constant([size]))
        )
        begin += size
    return slices_of_shards
