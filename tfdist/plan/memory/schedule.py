"""In which order TensorFlow computes a graph: one by one, or several at a time, as on a CPU.

Its executor (`tensorflow/core/common_runtime/executor.cc`) starts whatever has all its inputs,
first come first served. On a CPU it hands what takes long to other threads and does the rest at
once (`ScheduleReady`); what takes long are products of matrices and convolutions here, by the
number of their multiplications. Imports no TensorFlow.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tfdist.plan.memory.operations import Moment, Operation


def moments(
    operations: Mapping[str, Operation], in_order: Sequence[str], cpus: int
) -> Iterable[Moment]:
    """Returns the moments of operations on a device.

    Args:
        operations: By name.
        in_order: Those that are computed, as `order` returns them.
        cpus: Threads of a CPU; 0: of another device, which computes one by one.
    """
    if not cpus:
        return one_by_one(in_order)
    wanted = set(in_order)
    return [one for one in by_threads(operations, cpus) if one.name in wanted]


def by_threads(operations: Mapping[str, Operation], num_threads: int) -> list[Moment]:
    """Returns the moments of all operations, of which so many long ones run at a time.

    Of two that end together, the one that began first does first, and what waited for it is done
    before the other ends.
    """
    waiting = Waiting(operations)
    moments: list[Moment] = []
    short: deque[str] = deque()
    long: deque[str] = deque()
    running: list[tuple[float, int, str]] = []  # when they end, and in which order they began

    def sort(names: Iterable[str]) -> None:
        for name in names:
            (long if operations[name].work else short).append(name)

    sort(waiting.ready)
    now = 0.0
    while short or long or running:
        if short:
            name = short.popleft()
            moments += [Moment(name, True), Moment(name, False)]
        elif long and len(running) < num_threads:
            name = long.popleft()
            heapq.heappush(running, (now + operations[name].work, len(moments), name))
            moments.append(Moment(name, True))
            continue
        else:
            now, _, name = heapq.heappop(running)
            moments.append(Moment(name, False))
        sort(waiting.done(name))
    return moments


def order(operations: Mapping[str, Operation]) -> list[str]:
    """Returns the names in the order in which the executor starts them, one by one."""
    waiting = Waiting(operations)
    ready, started = deque(waiting.ready), []
    while ready:
        started.append(ready.popleft())
        ready += waiting.done(started[-1])
    return started


def one_by_one(names: Iterable[str]) -> Iterator[Moment]:
    """Yields the moments of operations of which each waits for the end of the one before."""
    for name in names:
        yield Moment(name, True)
        yield Moment(name, False)


class Waiting:
    """Which operations still wait for others.

    Attributes:
        ready: Those that wait for none.
    """

    def __init__(self, operations: Mapping[str, Operation]) -> None:
        self._readers: dict[str, list[str]] = {name: [] for name in operations}
        self._missing: dict[str, int] = {}
        for name, operation in operations.items():
            # Not a set: its order would be another one in each process.
            makers = [maker for maker, _ in operation.inputs] + list(operation.after)
            needs = [maker for maker in dict.fromkeys(makers) if maker in operations]
            self._missing[name] = len(needs)
            for maker in needs:
                self._readers[maker].append(name)
        self.ready = [name for name, number in self._missing.items() if number == 0]

    def done(self, name: str) -> list[str]:
        """Returns those that waited for an operation last."""
        found = []
        for reader in self._readers[name]:
            self._missing[reader] -= 1
            if self._missing[reader] == 0:
                found.append(reader)
        return found
