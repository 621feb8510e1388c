"""What the tensors of a graph take at most, in the order in which TensorFlow computes them.

A tensor lives from the operation that makes it to the last one that reads it. The order is that of
TensorFlow's executor, which starts whatever has all its inputs, first come first served. An
operation that works number by number writes over an input that nobody reads after it, as TensorFlow
does (`OpKernelContext::forward_input_or_allocate_output`). Imports no TensorFlow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tfdist.plan.memory.allocator import Allocator, Piece

#: An output of an operation: its name and the output's number.
Output = tuple[str, int]


class Operation(NamedTuple):
    """An operation of a graph.

    Attributes:
        kind: Its type, like `Conv2D`.
        inputs: What it reads.
        after: Names of operations that it waits for without reading anything of theirs.
        sizes: Bytes of each of its outputs.
        shares: Whether its outputs are its first input, seen otherwise (`Reshape`).
        overwrites: Whether it may write over an input of the same size.
        elsewhere: Whether what it makes is held anyway, as a variable is.
        device: Where it is computed; empty: there is one.
    """

    kind: str
    inputs: Sequence[Output]
    after: Sequence[str]
    sizes: Sequence[int]
    shares: bool = False
    overwrites: bool = False
    elsewhere: bool = False
    device: str = ""


class Peak(NamedTuple):
    """The moment at which a device holds most.

    Attributes:
        num_bytes: That are handed out then.
        at: The operation that runs then.
    """

    num_bytes: int
    at: str


def peak(
    operations: Mapping[str, Operation], in_order: Iterable[str], held: Iterable[int] = ()
) -> Peak:
    """Returns the moment at which the tensors of a graph on one device take most memory.

    Args:
        operations: By name. What an operation reads of one that is not among them takes nothing.
        in_order: Their names, as `order` returns them.
        held: Sizes of what is there all the time.
    """
    found = peaks(operations, in_order, {"": held})
    return found[""]


def peaks(
    operations: Mapping[str, Operation],
    in_order: Iterable[str],
    held: Mapping[str, Iterable[int]],
) -> dict[str, Peak]:
    """Returns the moment at which each device holds most.

    Args:
        operations: As of `peak`; one reads what is on its own device alone (`transfers`).
        in_order: As there.
        held: Of every device that there is: sizes of what is there all the time.
    """
    allocators = {device: Allocator() for device in held}
    for device, sizes in held.items():
        for size in sizes:
            allocators[device].allocate(size)
    buffers = _Buffers(operations, allocators)
    most = {device: Peak(one.in_use, "") for device, one in allocators.items()}
    for name in in_order:
        buffers.compute(name)
        device = operations[name].device
        if allocators[device].in_use > most[device].num_bytes:
            most[device] = Peak(allocators[device].in_use, name)
        buffers.finish(name)
    return most


def order(operations: Mapping[str, Operation]) -> list[str]:
    """Returns the names in the order in which the executor starts them."""
    readers: dict[str, list[str]] = {name: [] for name in operations}
    missing: dict[str, int] = {}
    for name, operation in operations.items():
        # Not a set: its order would be another one in each process.
        makers = [maker for maker, _ in operation.inputs] + list(operation.after)
        needs = [maker for maker in dict.fromkeys(makers) if maker in operations]
        missing[name] = len(needs)
        for maker in needs:
            readers[maker].append(name)
    ready = deque(name for name, number in missing.items() if number == 0)
    started = []
    while ready:
        name = ready.popleft()
        started.append(name)
        for reader in readers[name]:
            missing[reader] -= 1
            if missing[reader] == 0:
                ready.append(reader)
    return started


class _Buffers:
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

    def finish(self, name: str) -> None:
        """Lets go of what nobody is to read any more."""
        operation = self._operations[name]
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
