"""Predicts the peak memory of a graph from live tensors, with a model of TensorFlow's allocator.

A tensor is live from the operation that produces it to the last operation that reads it. An
element-wise operation overwrites an input that no later operation reads
(`OpKernelContext::forward_input_or_allocate_output`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tfdist.memory.graph import Operation, Output

_UNIT = 256
_REGION = 1 << 60
#: Maximum number of unused bytes at the end of a chunk.
_MAX_WASTE = 128 << 20


class Peak(NamedTuple):
    """The peak memory of a device.

    Attributes:
        num_bytes: Number of allocated bytes.
        at: Name of the operation that runs at the peak; empty before the first one.
    """

    num_bytes: int
    at: str


def peaks(
    operations: Mapping[str, Operation],
    order: Iterable[str],
    variables: Mapping[str, Iterable[int]],
) -> dict[str, Peak]:
    """Returns the peak of each device.

    Args:
        operations: The operations by name. Operations read only tensors on their device (see
            `graph.with_transfers`). Inputs that none of these operations produces take no memory.
        order: Names of the operations in the order in which they run.
        variables: For each device the bytes of each variable, in the order of their creation.
    """
    allocators = {device: Allocator() for device in variables}
    for device, sizes in variables.items():
        for size in sizes:
            allocators[device].allocate(size)
    tensors = _Tensors(operations, allocators)
    peaks_by_device = {
        device: Peak(allocator.in_use, "") for device, allocator in allocators.items()
    }
    for name in order:
        tensors.compute(name)
        device = operations[name].device
        if allocators[device].in_use > peaks_by_device[device].num_bytes:
            peaks_by_device[device] = Peak(allocators[device].in_use, name)
        tensors.release(name)
    return peaks_by_device


class Chunk(NamedTuple):
    """Allocated memory."""

    start: int
    size: int


class Allocator:
    """A model of TensorFlow's allocator for GPUs: best fit with coalescing.

    Chunks are often larger than requested: a free chunk is split only if it is at least twice as
    large as the request, or 128 MiB larger. Memory limits and statistics count such chunks. All are
    in one region, as on a GPU whose memory TensorFlow takes at once. Source:
    `tensorflow/tsl/framework/bfc_allocator.{h,cc}`.

    Attributes:
        in_use: Number of allocated bytes.
        peak: The largest value of `in_use` so far.
    """

    def __init__(self) -> None:
        self.in_use = self.peak = 0
        self._free: list[tuple[int, int]] = []  # size and start, sorted
        self._free_from: dict[int, int] = {}  # sizes of free chunks by their start
        self._free_to: dict[int, int] = {}  # starts of free chunks by their end
        self._add(0, _REGION)

    def allocate(self, num_bytes: int) -> Chunk:
        """Returns a chunk of at least `num_bytes`."""
        rounded = max(1, -(-num_bytes // _UNIT)) * _UNIT
        index = bisect.bisect_left(self._free, (rounded, -1))
        size, start = self._free[index]
        self._remove(start)
        if size >= 2 * rounded or size - rounded >= _MAX_WASTE:
            self._add(start + rounded, size - rounded)
            size = rounded
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        return Chunk(start, size)

    def free(self, chunk: Chunk) -> None:
        """Frees a chunk, and merges it with adjacent free chunks."""
        start, size = chunk
        self.in_use -= size
        if (before := self._free_to.get(start)) is not None:
            size += self._remove(before)
            start = before
        if start + size in self._free_from:
            size += self._remove(start + size)
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        bisect.insort(self._free, (size, start))
        self._free_from[start], self._free_to[start + size] = size, start

    def _remove(self, start: int) -> int:
        size = self._free_from.pop(start)
        del self._free_to[start + size]
        del self._free[bisect.bisect_left(self._free, (size, start))]
        return size


class _Tensors:
    """The memory of outputs that still have readers."""

    def __init__(
        self, operations: Mapping[str, Operation], allocators: Mapping[str, Allocator]
    ) -> None:
        self._operations, self._allocators = operations, allocators
        # A buffer is identified by the output that it was allocated for.
        self._chunks: dict[Output, Chunk] = {}
        self._sizes: dict[Output, int] = {}
        self._buffer: dict[Output, Output] = {}  # the buffer of each live output
        self._readers: dict[Output, int] = {}  # operations that will still read an output
        self._outputs: dict[Output, int] = {}  # live outputs of a buffer
        for operation in operations.values():
            for output in set(operation.inputs):
                self._readers[output] = self._readers.get(output, 0) + 1

    def compute(self, name: str) -> None:
        """Allocates the outputs of an operation, while its inputs are still live."""
        operation = self._operations[name]
        if operation.uncounted:
            return
        overwritten: set[Output] = set()
        for number, size in enumerate(operation.sizes):
            output = (name, number)
            if operation.alias and number < len(operation.inputs):
                self._put(output, self._buffer.get(operation.inputs[number]))
            elif operation.in_place and (
                reused := self._reusable_input(operation, size, overwritten)
            ):
                overwritten.add(reused)
                self._put(output, reused)
            elif size:
                allocator = self._allocators[operation.device]
                self._chunks[output], self._sizes[output] = allocator.allocate(size), size
                self._put(output, output)

    def release(self, name: str) -> None:
        """Frees inputs of an operation without further readers, and outputs without readers."""
        operation = self._operations[name]
        for read in set(operation.inputs):
            self._readers[read] -= 1
            if self._readers[read] == 0:
                self._drop(read)
        for number in range(len(operation.sizes)):
            if self._readers.get((name, number), 0) == 0:
                self._drop((name, number))

    def _reusable_input(self, operation: Operation, size: int, taken: set[Output]) -> Output | None:
        """Returns the buffer of an input of which this operation is the last reader."""
        for read in operation.inputs:
            buffer = self._buffer.get(read)
            if buffer is None or buffer in taken or self._sizes[buffer] != size:
                continue
            if self._outputs[buffer] == 1 and self._readers[read] == 1:
                return buffer
        return None

    def _put(self, output: Output, buffer: Output | None) -> None:
        if buffer is not None:
            self._buffer[output] = buffer
            self._outputs[buffer] = self._outputs.get(buffer, 0) + 1

    def _drop(self, output: Output) -> None:
        buffer = self._buffer.pop(output, None)
        if buffer is None:
            return
        self._outputs[buffer] -= 1
        if self._outputs[buffer] == 0:
            device = self._operations[buffer[0]].device
            self._allocators[device].free(self._chunks.pop(buffer))
