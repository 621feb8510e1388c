"""What the tensors of a graph take at most, beside what is there all the time.

Imports no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tfdist.plan.memory.allocator import Allocator
from tfdist.plan.memory.buffers import Buffers
from tfdist.plan.memory.operations import Moment, Operation


class Kept(NamedTuple):
    """What is there all the time: a variable, mostly.

    Attributes:
        num_bytes: Of it.
        drawn: Whether it began as random numbers. Two buffers of the same size lie before it then,
            the numbers and their multiples, and what it frees shapes what comes after.
    """

    num_bytes: int
    drawn: bool = False


class Peak(NamedTuple):
    """The moment at which a device holds most.

    Attributes:
        num_bytes: That are handed out then.
        at: The operation that runs then.
    """

    num_bytes: int
    at: str


def peak(
    operations: Mapping[str, Operation], moments: Iterable[Moment], held: Iterable[Kept] = ()
) -> Peak:
    """Returns the moment at which the tensors of a graph on one device take most memory.

    Args:
        operations: By name. What an operation reads of one that is not among them takes nothing.
        moments: When each begins and ends, as `schedule.moments` says.
        held: What is there all the time, in the order in which it was made.
    """
    found = peaks(operations, moments, {"": held})
    return found[""]


def peaks(
    operations: Mapping[str, Operation],
    moments: Iterable[Moment],
    held: Mapping[str, Iterable[Kept]],
) -> dict[str, Peak]:
    """Returns the moment at which each device holds most.

    Args:
        operations: As of `peak`; one reads what is on its own device alone (`transfers`).
        moments: As there.
        held: As there, of every device that there is.
    """
    allocators = {device: Allocator() for device in held}
    for device, kept in held.items():
        for one in kept:
            _make(one, allocators[device])
    buffers = Buffers(operations, allocators)
    most = {device: Peak(one.in_use, "") for device, one in allocators.items()}
    for name, begins in moments:
        if not begins:
            buffers.finish(name)
            continue
        buffers.compute(name)
        device = operations[name].device
        if allocators[device].in_use > most[device].num_bytes:
            most[device] = Peak(allocators[device].in_use, name)
    return most


def _make(one: Kept, allocator: Allocator) -> None:
    before = [allocator.allocate(one.num_bytes) for _ in range(2)] if one.drawn else []
    allocator.allocate(one.num_bytes)
    for piece in before:
        allocator.free(piece)
