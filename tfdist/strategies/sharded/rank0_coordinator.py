"""What one process does with variables of which each has a part, all others do with it.

To read a variable that is kept in parts takes all processes, but much that reads is done by rank 0
alone: it saves the model, writes checkpoints, runs callbacks. So rank 0 leads. Whatever it reads or
assigns, at any time, it first says to the others; they hear of it where they next wait for rank 0
(a step, an agreement of the loops, `tfdist.barrier`, the end of the program), or where they read
the same variable themselves, and take part until rank 0 has come there, too.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import enum
import functools
import itertools
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist import cluster
from tfdist.errors import ClusterError
from tfdist.strategies.clock import read_by_host
from tfdist.strategies.collectives import traffic
from tfdist.upstream.keras_variables import ShardedVariable
from tfdist.upstream.tensorflow_graphs import outermost_graph


class _What(enum.IntEnum):
    NOTHING = 0  # rank 0 has come to where all are
    READ = 1
    WRITE = 2


class _Asked(NamedTuple):
    what: int
    number: int  # of the variable


class Rank0Coordinator:
    """The side of this process; there is one of it.

    Args:
        hvd: `horovod.tensorflow`, started.

    Attributes:
        has_failed: Whether this process is about to end by an error, and waits for nobody.
    """

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self._is_first = hvd.rank() == 0
        self._numbers = itertools.count()
        self._variables: weakref.WeakValueDictionary[int, ShardedVariable]
        self._variables = weakref.WeakValueDictionary()
        self._joins: weakref.WeakKeyDictionary[tf.Graph, collections.Counter[int]]
        self._joins = weakref.WeakKeyDictionary()
        self.has_failed = False
        self._has_any, self._depth = False, 0
        # Whether rank 0 waits where this process has not come yet.
        self._is_awaited = False

    def number(self) -> int:
        """Returns the number of one variable more; all processes divide them in one order."""
        if not self._has_any:
            # After Horovod's own, so that it is called before that.
            atexit.register(self._wait_at_exit)
            cluster.on_end(self.meet)
        self._has_any = True
        return next(self._numbers)

    def know(self, number: int, variable: ShardedVariable) -> None:
        """Lets the other processes ask for a variable by its number."""
        self._variables[number] = variable

    @property
    def all_take_part(self) -> bool:
        """Whether all processes are known to run the code that asks."""
        return self._depth > 0

    @contextlib.contextmanager
    def collective_section(self) -> Iterator[None]:
        """Within it all processes run the same code, which joins variables by itself."""
        self.meet()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def meet(self) -> None:
        """Waits until rank 0 comes here, and takes part in what it does before."""
        if not self._has_any or self._depth:
            return
        if self._is_first:
            self._say(_Asked(_What.NOTHING, 0))
            return
        while not self._is_awaited:
            self._take_part(self._heard())
        self._is_awaited = False

    def read(self, number: int, part: tf.Variable) -> tf.Tensor:
        """Returns all elements of a variable, to each process that reads it."""
        self._follow(_Asked(_What.READ, number))
        return self.joined(number, part)

    def written(self, number: int, value: tf.Tensor) -> tf.Tensor:
        """Returns what rank 0 assigns to a variable, to each process that assigns to it."""
        self._follow(_Asked(_What.WRITE, number))
        return self.of_first(value)

    def joined(self, number: int, part: tf.Variable | tf.Tensor) -> tf.Tensor:
        """Returns all elements of a variable; called by all processes, also in a graph."""
        own = tf.identity(part)
        sent = tf.bitcast(own, tf.uint16) if own.dtype == tf.bfloat16 else own
        name = f"tfdist_join_{number}_{self._num_before(number)}"
        whole = self._hvd.allgather(sent, name=name, ignore_name_scope=True)
        traffic.note("all-gather", [whole])
        if not tf.executing_eagerly():
            # Where only one process's rows count, the graphs of the others do not use the elements,
            # and would not join.
            read_by_host(whole)
        return tf.bitcast(whole, own.dtype) if own.dtype == tf.bfloat16 else whole

    def _num_before(self, number: int) -> int:
        """Counts the joins of a variable in what is traced, which may run at a time.

        With those in other loops: TensorFlow begins one before the loop ahead of it has ended.
        """
        if tf.executing_eagerly():
            return 0
        joins = self._joins.setdefault(outermost_graph(), collections.Counter())
        joins[number] += 1
        return joins[number]

    def of_first(self, value: tf.Tensor) -> tf.Tensor:
        """Returns what rank 0 calls this with; all processes do, outside of any graph."""
        # Horovod knows no bfloat16, whose bits it may carry.
        sent = tf.bitcast(value, tf.uint16) if value.dtype == tf.bfloat16 else value
        told = self._hvd.broadcast(sent, 0, name="tfdist_of_first")
        return tf.bitcast(told, value.dtype) if value.dtype == tf.bfloat16 else told

    def _follow(self, own: _Asked) -> None:
        """Comes to where rank 0 does what this process does."""
        if self._is_first:
            self._say(own)
            return
        while not self._is_awaited and (asked := self._heard()) != own:
            self._take_part(asked)
        if self._is_awaited:
            variable = self._variables.get(own.number)
            raise ClusterError(
                f"Rank {self._hvd.rank()} reads or assigns to "
                f"{variable.path if variable is not None else 'a variable'!r}, of which each rank "
                "has a part, and rank 0 does not: do it on all ranks, or on rank 0 alone."
            )

    def _take_part(self, asked: _Asked) -> None:
        if asked.what == _What.NOTHING:
            self._is_awaited = True
            return
        variable = self._variables.get(asked.number)
        if variable is None:
            raise ClusterError(
                "Rank 0 reads or assigns to a variable of a model that this rank has given up: "
                "keep the Trainer on all ranks as long as rank 0 works with its model."
            )
        (part,) = variable.parts
        if asked.what == _What.READ:
            self.joined(asked.number, part)
        else:
            size = variable.shape.num_elements()
            value = self.of_first(tf.zeros([size], part.dtype))
            variable.assign_parts(value)

    def _say(self, asked: _Asked) -> _Asked:
        with tf.device("CPU:0"):
            told = self._hvd.broadcast(tf.constant(asked, tf.int64), 0, name="tfdist_asked")
        return _Asked(*map(int, told))

    def _heard(self) -> _Asked:
        return self._say(_Asked(_What.NOTHING, 0))

    def _wait_at_exit(self) -> None:
        """Lets rank 0 save its model when the others have nothing left to do.

        It ends the wait by ending itself, which shuts Horovod down.
        """
        is_failing = self.has_failed or hasattr(sys, "last_value")
        if self._is_first or is_failing:
            return
        with contextlib.suppress(tf.errors.OpError, RuntimeError):
            while True:
                self.meet()


@functools.cache
def of_process(hvd: Any) -> Rank0Coordinator:
    """Returns the one of this process."""
    return Rank0Coordinator(hvd)
