"""The loop of asynchronous workers, and the ledger of what they have done.

Each call of the loop runs one closure per worker, and each closure is a loop in the graph that
takes tickets for steps until there are none left. Tickets, batches and the ledger are with the
chief: a worker that dies loses at most the step that it was at, and a fast worker makes more steps
than a slow one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.groups.base import ProcessGroup
from tfdist.strategies import inner_loop
from tfdist.strategies.feed import Feed
from tfdist.strategies.inner_loop import Logs, Loop, LoopFn, LoopResult, Receive, Step

#: The largest staleness that is counted separately.
MOST_STALENESS = 64

#: A limit that `ResourceCountUpTo` requires, for tickets and updates.
_NO_LIMIT = 2**62


class Ledger:
    """Counts what the workers do, exactly, in variables of the chief that they change atomically.

    Staleness is the number of updates by others between a worker's reading of the weights and its
    own update (Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server").

    Attributes:
        ticket: The number of the step that is being traced, int32; 0 outside of a step.
    """

    def __init__(self) -> None:
        self.ticket: Any = 0
        with tf.device("/job:chief/task:0/device:CPU:0"):
            self._tickets = tf.Variable(-1, trainable=False, dtype=tf.int64)
            self._updates = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._rows = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._staleness = tf.Variable(tf.zeros([MOST_STALENESS + 1], tf.int64), trainable=False)

    def last_ticket(self) -> int:
        """Returns the last number that was given out; -1 before the first."""
        return int(self._tickets)

    def take_ticket(self) -> tf.Tensor:
        """Returns the next number, int64, which no other step gets."""
        return _count(self._tickets) + 1

    @contextmanager
    def holding(self, ticket: tf.Tensor) -> Iterator[None]:
        """A context in which a step with the number `ticket` is traced."""
        self.ticket = tf.cast(ticket, tf.int32)
        try:
            yield
        finally:
            self.ticket = 0

    def num_updates(self) -> tf.Tensor:
        """Returns the number of updates so far, int64."""
        return self._updates.read_value()

    def note(self, rows: tf.Tensor, seen: tf.Tensor) -> tf.Tensor:
        """Records an update; returns a tensor that is ready when it is recorded."""
        staleness = tf.clip_by_value(_count(self._updates) - seen, 0, MOST_STALENESS)
        one = tf.IndexedSlices(tf.constant([1], tf.int64), staleness[tf.newaxis])
        with tf.control_dependencies([self._rows.assign_add(tf.cast(rows, tf.int64))]):
            return self._staleness.scatter_add(one)[0]

    def staleness(self) -> np.ndarray:
        """Returns the number of updates with a staleness of 0, 1, 2, ...; int64."""
        return self._staleness.numpy()

    def totals(self) -> tuple[int, int]:
        """Returns the number of steps so far, and of their rows."""
        return int(self.staleness().sum()), int(self._rows)

    def summary(self) -> dict[str, str]:
        """Returns rows for the table at the end of a training."""
        counts = self.staleness()
        if not counts.any():
            return {}
        mean = float(np.average(np.arange(len(counts)), weights=counts))
        most = int(np.flatnonzero(counts)[-1])
        more = " or more" if most == MOST_STALENESS else ""
        return {"staleness": f"{mean:.2f} updates on average, at most {most}{more}"}


def _count(variable: tf.Variable) -> tf.Tensor:
    """Adds one and returns the old value atomically, unlike `assign_add` and a read after it."""
    return tf.raw_ops.ResourceCountUpTo(resource=variable.handle, limit=_NO_LIMIT, T=tf.int64)


class AsynchronousFeed(Feed):
    """Global batches that each go to any worker that is free."""

    def __init__(
        self,
        devices: Sequence[str],
        group: ProcessGroup,
        ledger: Ledger,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        num_workers: int,
    ) -> None:
        super().__init__(devices, group)
        self._ledger, self._coordinator, self._num_workers = ledger, coordinator, num_workers

    def compile(
        self, step: Step, loop: Loop = inner_loop.in_graph, *arguments: Any, **options: Any
    ) -> LoopFn:
        if loop is inner_loop.eager or not step.training:
            return super().compile(step, loop, *arguments, **options)
        return asynchronous(self.unpack, step, self._ledger, self._coordinator, self._num_workers)


def asynchronous(
    receive: Receive,
    step: Step,
    ledger: Ledger,
    coordinator: tf.distribute.coordinator.ClusterCoordinator,
    num_workers: int,
) -> LoopFn:
    """Returns a loop of steps, each made by any worker that is free."""
    closure = tf.function(_Closure(receive, step, ledger), autograph=False)
    logs = tf.function(step.logs, autograph=False)

    def run(iterator: Iterator[Any], num_steps: tf.Tensor) -> tuple[LoopResult, Logs]:
        (steps_before, rows_before), waited = ledger.totals(), 0.0
        left, ended = int(num_steps), False
        while left > 0 and not ended:  # repeated for steps that were lost with their worker
            arguments = (iterator, tf.constant(ledger.last_ticket() + left, tf.int64))
            # Each of the closures runs on a worker that is free.
            sent = [
                coordinator.schedule(closure, args=arguments) for _ in range(min(num_workers, left))
            ]
            coordinator.join()
            results = [value.fetch() for value in sent]
            waited += sum(seconds for seconds, _ in results) / len(results)
            ended = not all(more for _, more in results)
            steps, rows = ledger.totals()
            left = int(num_steps) - (steps - steps_before)
        return LoopResult(steps - steps_before, rows - rows_before, waited), logs()

    return run


class _Closure:
    """The steps of one worker in one call, while there are batches and tickets."""

    def __init__(self, receive: Receive, step: Step, ledger: Ledger) -> None:
        self._receive, self._step, self._ledger = receive, step, ledger

    def __call__(self, iterator: Any, last_ticket: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Makes steps up to the last ticket; to be traced.

        Returns the seconds waited for data, and whether there were batches until the end.
        """

        def repeat(
            waited: tf.Tensor, done_at: tf.Tensor, _: tf.Tensor, more: tf.Tensor
        ) -> tuple[tf.Tensor, ...]:
            ticket = self._ledger.take_ticket()
            return tf.cond(
                ticket <= last_ticket,
                lambda: self._take(iterator, ticket, waited, done_at),
                lambda: (waited, done_at, tf.constant(False), more),
            )

        begin = (tf.constant(0.0, tf.float64), tf.timestamp(), tf.constant(True), tf.constant(True))
        waited, _, _, more = tf.while_loop(lambda _, __, go_on, ___: go_on, repeat, begin)
        return waited, more

    def _take(
        self, iterator: Any, ticket: tf.Tensor, waited: tf.Tensor, done_at: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        """Takes a batch and, if there is one, makes a step."""
        batch = iterator.get_next_as_optional()
        has_batch = batch.has_value()
        with tf.control_dependencies([has_batch]):
            ready_at, seen = tf.timestamp(), self._ledger.num_updates()
        waited += tf.maximum(ready_at - done_at, 0)
        with tf.control_dependencies([seen]):  # before any weight is read
            has_batch = tf.identity(has_batch)
        done_at = tf.cond(has_batch, lambda: self._make(ticket, batch, seen), lambda: ready_at)
        return waited, done_at, has_batch, has_batch

    def _make(self, ticket: tf.Tensor, batch: Any, seen: tf.Tensor) -> tf.Tensor:
        """Makes a step and records it; returns the time when it was done."""
        element = self._receive(batch.get_value())
        with self._ledger.holding(ticket):
            done = self._step(element.num_rows, element.shares)
        with tf.control_dependencies(tf.nest.flatten(done, expand_composites=True)):
            noted = self._ledger.note(element.num_rows, seen)
        with tf.control_dependencies([noted]):
            return tf.timestamp()
