"""The loop of asynchronous workers: each takes tickets for steps until there are no more.

A call of the loop is one closure a worker, each a loop in the graph. Tickets, batches and the
ledger of what was done are with the chief: a worker that dies loses the step it was at, nothing
more, and a fast worker makes more steps than a slow one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.strategies.inner_loop import Logs, LoopFn, LoopResult, Receive, Step
from tfdist.strategies.parameter_server.ledger import Ledger


def asynchronous(
    receive: Receive,
    step: Step,
    ledger: Ledger,
    coordinator: tf.distribute.coordinator.ClusterCoordinator,
    num_workers: int,
) -> LoopFn:
    """Returns a loop of steps, each made by whichever worker is free.

    Args:
        receive: Makes a global batch of what the iterator yields.
        step: To repeat.
        ledger: Counts the steps.
        coordinator: Sends closures to workers, and again where one dies.
        num_workers: How many there are.
    """
    closure = tf.function(_Closure(receive, step, ledger), autograph=False)
    logs = tf.function(step.logs, autograph=False)

    def run(iterator: Iterator[Any], num_steps: tf.Tensor) -> tuple[LoopResult, Logs]:
        (steps_before, rows_before), waited = ledger.totals(), 0.0
        left, ended = int(num_steps), False
        while left > 0 and not ended:  # again for steps that died with their worker
            arguments = (iterator, tf.constant(ledger.last_ticket() + left, tf.int64))
            results = _on_workers(coordinator, closure, arguments, min(num_workers, left))
            waited += sum(seconds for seconds, _ in results) / len(results)
            ended = not all(more for _, more in results)
            steps, rows = ledger.totals()
            left = int(num_steps) - (steps - steps_before)
        return LoopResult(steps - steps_before, rows - rows_before, waited), logs()

    return run


def _on_workers(
    coordinator: tf.distribute.coordinator.ClusterCoordinator,
    closure: Any,
    arguments: tuple[Any, ...],
    times: int,
) -> list[Any]:
    """Has a closure run so many times, each by a worker that is free; returns what came of it."""
    sent = [coordinator.schedule(closure, args=arguments) for _ in range(times)]
    coordinator.join()
    return [value.fetch() for value in sent]


class _Closure:
    """What one worker does in one call: steps, for as long as there are batches and tickets."""

    def __init__(self, receive: Receive, step: Step, ledger: Ledger) -> None:
        self._receive, self._step, self._ledger = receive, step, ledger

    def __call__(self, iterator: Any, last_ticket: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Makes steps up to the last ticket; to be traced.

        Returns the seconds waited for data, and whether there were batches to the end.
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
        """Takes a batch, and makes the step if there is one."""
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
        """Makes a step and notes it; returns when it was done."""
        element = self._receive(batch.get_value())
        with self._ledger.holding(ticket):
            done = self._step(element.num_rows, element.shares)
        with tf.control_dependencies(tf.nest.flatten(done, expand_composites=True)):
            noted = self._ledger.note(element.num_rows, seen)
        with tf.control_dependencies([noted]):
            return tf.timestamp()
