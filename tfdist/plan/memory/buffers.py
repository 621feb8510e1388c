"""The memory of tensors that are still to be read.

A tensor lives from the operation that makes it to the last one that reads it. An operation that
works number by number writes over an input that nobody reads after it, as TensorFlow does
(`OpKernelContext::forward_input_or_allocate_output`). Imports no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.plan.memory.allocator import Allocator, Piece
from tfdist.plan.memory.operations import Operation, Output


class Buffers:
    """The memory behind the outputs that are still to be read."""

    def __init__(
        self, operations: Mapping[str, Operation], allocators: Mapping[str, Allocator]
    ) -> None:
        self._operations, self._allocators = operations, allocators
        self._pieces: dict[Output, Piece] = {}  # by the output for which they were asked
        self._sizes: dict[Output, int] = {}  # that were asked
        self._buffer: dict[Output, Output] = {}  # whose piece an output is in
        self._readers: dict[Output, int] = {}  # operations that are to read it
        self._users: dict[Output, int] = {}  # outputs in a piece that are to be read
        self._workspaces: dict[str, list[Piece]] = {}  # of operations that compute
        for operation in operations.values():
            for output in set(operation.inputs):
                self._readers[output] = self._readers.get(output, 0) + 1

    def compute(self, name: str) -> None:
        """Makes the outputs of an operation, whose inputs are still there."""
        operation = self._operations[name]
        if operation.elsewhere:
            return
        written: set[Output] = set()
        for number, size in enumerate(operation.sizes):
            output = (name, number)
            if operation.shares and number == 0 and operation.inputs:
                self._put(output, self._buffer.get(operation.inputs[0]))
            elif operation.overwrites and (found := self._free_input(operation, size, written)):
                written.add(found)
                self._put(output, found)
            elif size:
                allocator = self._allocators[operation.device]
                self._pieces[output], self._sizes[output] = allocator.allocate(size), size
                self._put(output, output)
        if operation.workspaces:
            allocate = self._allocators[operation.device].allocate
            self._workspaces[name] = list(map(allocate, operation.workspaces))

    def finish(self, name: str) -> None:
        """Lets go of what nobody is to read any more."""
        operation = self._operations[name]
        for piece in self._workspaces.pop(name, ()):
            self._allocators[operation.device].free(piece)
        for read in set(operation.inputs):
            self._readers[read] -= 1
            if self._readers[read] == 0:
                self._drop(read)
        for number in range(len(operation.sizes)):
            if self._readers.get((name, number), 0) == 0:
                self._drop((name, number))

    def _free_input(self, operation: Operation, size: int, taken: set[Output]) -> Output | None:
        """The buffer of an input that this operation is the last to read."""
        for read in operation.inputs:
            buffer = self._buffer.get(read)
            if buffer is None or buffer in taken or self._sizes[buffer] != size:
                continue
            if self._users[buffer] == 1 and self._readers[read] == 1:
                return buffer
        return None

    def _put(self, output: Output, buffer: Output | None) -> None:
        if buffer is not None:
            self._buffer[output] = buffer
            self._users[buffer] = self._users.get(buffer, 0) + 1

    def _drop(self, output: Output) -> None:
        buffer = self._buffer.pop(output, None)
        if buffer is None:
            return
        self._users[buffer] -= 1
        if self._users[buffer] == 0:
            # Who reads it is where it is, so that this is whose piece it is.
            device = self._operations[buffer[0]].device
            self._allocators[device].free(self._pieces.pop(buffer))
