"""The inner loop: many steps in one call, in the graph, each on a batch taken first.

The batch is taken before the step begins, so that the end of the data ends the loop without half
a step: `optimizer.iterations`, schedules and seeds count exactly the steps that were made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf


class Made(NamedTuple):
    """What a call has done."""

    num_steps: Any  # int32 scalar
    num_rows: Any  # in those steps; int64 scalar
    seconds_waited: Any  # by the devices, for data; float64 scalar


Logs = dict[str, Any]

#: Takes an iterator and the number of steps to make at most, int32; returns the logs after them.
Run = Callable[[Iterator[Any], tf.Tensor], tuple[Made, Logs]]


#: Makes a step on one element; returns its rows and tensors that are ready when it is made.
StepOnElement = Callable[[Any], tuple[tf.Tensor, Any]]


def in_graph(step: StepOnElement, logs: Callable[[], Logs], may_end: bool = True) -> Run:
    """Returns a loop of `step`, and `logs` after it, as one `tf.function`.

    Args:
        step: Makes a step on one element.
        logs: Called once, after the steps.
        may_end: Whether the data may end before the steps asked for. To ask at each step costs a
            tiny network a quarter of its time.
    """

    def run(iterator: Any, num_steps: tf.Tensor) -> tuple[Made, Logs]:
        def take(made: Made, done_at: tf.Tensor, _: tf.Tensor) -> tuple[Made, Any, Any]:
            batch = iterator.get_next_as_optional() if may_end else iterator.get_next()
            has_batch = batch.has_value() if may_end else tf.constant(True)
            arrived = has_batch if may_end else next(t for t in _leaves(batch) if t is not None)
            with tf.control_dependencies([arrived]):
                ready_at = tf.timestamp()

            def make_step() -> tuple[tf.Tensor, tf.Tensor]:
                rows, done = step(batch.get_value() if may_end else batch)
                with tf.control_dependencies(_leaves(done)):
                    return tf.cast(rows, tf.int64), tf.timestamp()

            def end() -> tuple[tf.Tensor, tf.Tensor]:
                return tf.constant(0, tf.int64), ready_at

            # Data that were ready before the last step was done kept nobody waiting.
            waited = made.seconds_waited + tf.maximum(ready_at - done_at, 0)
            rows, done_at = tf.cond(has_batch, make_step, end) if may_end else make_step()
            num_steps = made.num_steps + tf.cast(has_batch, tf.int32)
            return Made(num_steps, made.num_rows + rows, waited), done_at, has_batch

        nothing = Made(tf.constant(0), tf.constant(0, tf.int64), tf.constant(0.0, tf.float64))
        made, _, _ = tf.while_loop(
            lambda made, _, more: tf.logical_and(made.num_steps < num_steps, more),
            take,
            (nothing, tf.timestamp(), tf.constant(True)),
        )
        return made, logs()

    return tf.function(run, reduce_retracing=True, autograph=False)


def _leaves(structure: Any) -> list[Any]:
    return tf.nest.flatten(structure, expand_composites=True)


def eager(step: StepOnElement, logs: Callable[[], Logs]) -> Run:
    """Returns a loop of `step` in Python, for `run_eagerly=True`: slow, and open to a debugger."""

    def run(iterator: Iterator[Any], num_steps: tf.Tensor) -> tuple[Made, Logs]:
        made = Made(0, 0, 0.0)
        for _ in range(int(num_steps)):
            began = time.perf_counter()
            try:
                element = next(iterator)
            except StopIteration:
                break
            waited = made.seconds_waited + time.perf_counter() - began
            rows, _ = step(element)
            made = Made(made.num_steps + 1, made.num_rows + int(rows), waited)
        return made, logs()

    return run
