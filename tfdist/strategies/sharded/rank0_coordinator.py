"""Coordinates access to variables that are sharded over processes.

Reading such a variable takes all processes, but rank 0 alone saves the model, writes checkpoints
and runs callbacks. So rank 0 coordinates: before it reads or assigns, it tells the other processes.
They listen where they next wait for rank 0 (a step, an agreement of the loops, `tfdist.barrier`,
the end of the program) or where they read the same variable themselves, and take part until rank 0
arrives there, too.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import enum
import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist import cluster
from tfdist.errors import ClusterError
from tfdist.groups import agreement
from tfdist.groups.base import ProcessGroup
from tfdist.strategies.inner_loop import read_by_host
from tfdist.upstream.keras_variables import ShardedVariable
from tfdist.upstream.tensorflow_graphs import outermost_graph


class _Action(enum.IntEnum):
    ARRIVED = 0  # rank 0 has reached the point where the others wait
    READ = 1
    WRITE = 2
    END = 3  # rank 0 ends, and asks for nothing more
    COMPARE = 4


class _Request(NamedTuple):
    action: int
    number: int  # of the variable


class Rank0Coordinator:
    """This process's side of the coordination; there is one for each group of processes.

    Attributes:
        group: The processes that have shards.
        has_failed: Whether this process is about to end with an error, and waits for nobody.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._is_first = group.rank == 0
        self._numbers = itertools.count()
        self._variables: weakref.WeakValueDictionary[int, ShardedVariable]
        self._variables = weakref.WeakValueDictionary()
        self._sizes: dict[int, Sequence[int]] = {}
        self._joins: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[int | str]]
        self._joins = weakref.WeakKeyDictionary()
        self.has_failed = False
        self._has_any, self._depth, self._has_ended = False, 0, False
        # Whether rank 0 waits at a point that this process has not reached yet.
        self._is_awaited = False

    def number(self) -> int:
        """Returns the number of a new variable; all processes shard variables in the same order."""
        if not self._has_any:
            # Registered after the group's own handler, so that it is called before that.
            atexit.register(self._wait_at_exit)
            cluster.on_end(self.meet)
        self._has_any = True
        return next(self._numbers)

    def know(self, number: int, variable: ShardedVariable, sizes: Sequence[int]) -> None:
        """Lets other processes ask for a variable by its number."""
        self._variables[number], self._sizes[number] = variable, sizes

    @property
    def all_take_part(self) -> bool:
        """Whether all processes are known to run the code of the caller."""
        return self._depth > 0

    @contextlib.contextmanager
    def collective_section(self) -> Iterator[None]:
        """A context in which all processes run the same code, which may read sharded variables."""
        self.meet()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def meet(self) -> None:
        """Waits until rank 0 arrives here, and takes part in what it does before."""
        if not self._has_any or self._depth:
            return
        if self._is_first:
            self._send(_Request(_Action.ARRIVED, 0))
            return
        while not self._is_awaited and not self._has_ended:
            self._take_part(self._receive())
        self._is_awaited = False

    def read(self, number: int, part: tf.Variable, sizes: Sequence[int]) -> tf.Tensor:
        """Returns all elements of a variable, in each process that reads it."""
        self._follow(_Request(_Action.READ, number))
        return self.joined(number, part, sizes)

    def written(self, number: int, value: tf.Tensor) -> tf.Tensor:
        """Returns the value that rank 0 assigns, in each process that assigns to the variable."""
        self._follow(_Request(_Action.WRITE, number))
        return self.group.broadcast_tensor(value)

    def is_same(self, number: int, text: str) -> bool:
        """Returns whether all processes assign what `text` describes to a variable."""
        self._follow(_Request(_Action.COMPARE, number))
        return self._equal(agreement.digest(text.encode()))

    def _equal(self, value: float) -> bool:
        return len(np.unique(self.group.gather([value]))) == 1

    def joined(
        self, number: int | str, part: tf.Variable | tf.Tensor, sizes: Sequence[int]
    ) -> tf.Tensor:
        """Returns all elements of a variable; called by all processes, also in a graph."""
        count = 0
        if not tf.executing_eagerly():
            # The gathers of a variable in a graph may run concurrently. Those in other loops count,
            # too: TensorFlow starts a loop before the one ahead has ended.
            joins = self._joins.setdefault(outermost_graph(), collections.Counter())
            joins[number] += 1
            count = joins[number]
        name = f"tfdist_join_{number}_{count}"
        whole = self.group.all_gather(tf.identity(part), sizes, name)
        if not tf.executing_eagerly():
            # Where only one process's rows count, the graphs of the others do not use the elements,
            # and would leave the exchange out.
            read_by_host(whole)
        return whole

    def _follow(self, own: _Request) -> None:
        """Waits until rank 0 does what this process does."""
        if self._is_first:
            self._send(own)
            return
        while not self._is_awaited and (request := self._receive()) != own:
            self._take_part(request)
        if self._is_awaited:
            variable = self._variables.get(own.number)
            raise ClusterError(
                f"Rank {self.group.rank} reads or assigns to "
                f"{variable.path if variable is not None else 'a variable'!r}, of which each rank "
                "has a part, and rank 0 does not: do it on all ranks, or on rank 0 alone."
            )

    def _take_part(self, request: _Request) -> None:
        if request.action == _Action.ARRIVED:
            self._is_awaited = True
            return
        if request.action == _Action.END:
            self._has_ended = True
            return
        if request.action == _Action.COMPARE:
            self._equal(-1)  # unlike any digest: this process does not assign
            return
        variable = self._variables.get(request.number)
        if variable is None:
            raise ClusterError(
                "Rank 0 reads or assigns to a variable of a model that this rank has discarded: "
                "keep the Trainer on all ranks as long as rank 0 works with its model."
            )
        (part,) = variable.parts
        if request.action == _Action.READ:
            self.joined(request.number, part, self._sizes[request.number])
        else:
            size = variable.shape.num_elements()
            value = self.group.broadcast_tensor(tf.zeros([size], part.dtype))
            variable.assign_parts(value)

    def _send(self, request: _Request) -> _Request:
        with tf.device("CPU:0"):
            sent = self.group.broadcast_tensor(tf.constant(request, tf.int64))
        return _Request(*map(int, sent))

    def _receive(self) -> _Request:
        return self._send(_Request(_Action.ARRIVED, 0))

    def _wait_at_exit(self) -> None:
        """Lets rank 0 save its model when the others have nothing left to do.

        Horovod's rank 0 ends the wait by shutting down; with other groups it has to say so.
        """
        is_failing = self.has_failed or hasattr(sys, "last_value")
        if is_failing:
            return
        if self._is_first:
            if not self.group.shuts_down_at_exit:
                self._send(_Request(_Action.END, 0))
            return
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            while not self._has_ended:
                self.meet()


#: The coordinators of this process, by the kind of its group.
_known: dict[type[ProcessGroup], Rank0Coordinator] = {}


def coordinator_of(group: ProcessGroup) -> Rank0Coordinator:
    """Returns the coordinator of this process, which exchanges through a group of the same kind."""
    coordinator = _known.setdefault(type(group), Rank0Coordinator(group))
    group.before_exchange(coordinator.meet)
    return coordinator
