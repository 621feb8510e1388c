"""For how much of their time the stages of a training waited: the bubble, as it came out.

A stage computes from when it has what its turn needs, and has ended the turn before, to the end of
the turn; else it waits. What it shares its cores or its link with makes turns longer, not bubbles.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.clock import now, read_by_host
from tfdist.strategies.pipeline.order import Order
from tfdist.upstream.tensorflow import computes_in_one_order


class MeasuredBubble:
    """Adds up, over the steps of a process, how long its stages computed and how long steps took.

    Args:
        num_stages: Of the pipeline.
        num_micro_batches: Of a batch.
    """

    def __init__(self, num_stages: int, num_micro_batches: int) -> None:
        self._num_stages, self._num_micro_batches = num_stages, num_micro_batches
        self._seconds: tf.Variable | None = None

    def prepare(self) -> None:
        """Makes room for the sums; called outside of any graph."""
        if self._seconds is None:
            with tf.device("CPU:0"):
                self._seconds = tf.Variable(tf.zeros([2], tf.float64), name="computing_and_all")

    def share(self) -> float | None:
        """Returns the share of the stages' time in which they waited; None: it is not known.

        Only forward and backward passes count, as in `bubble`.
        """
        if self._seconds is None:
            return None
        computing, total = self._seconds.numpy()
        return 1 - computing / total if total > 0 else None

    def note(self, inputs: Sequence[tf.Tensor], order: Order) -> None:
        """Has a step count that is traced, when all of it is there.

        Args:
            inputs: Of its first micro-batch; without dense ones nothing is counted.
            order: Of the step; of one that goes only forward, nothing is counted.
        """
        turns = order.turns()
        if self._seconds is None or not inputs or not any(back for _, _, back in turns):
            return
        with tf.device("CPU:0"):
            begin = _when(inputs)
            arrivals, ends = self._times(begin, turns)
            computing = tf.reduce_sum(_lengths(begin, arrivals, ends))
            total = self._num_stages * (tf.reduce_max(ends) - begin)
            self._seconds.assign_add([computing, total])

    def _times(
        self, begin: tf.Tensor, turns: Mapping[tuple[int, int, bool], Sequence[tf.Tensor]]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns when turns had what they need, and when they ended: `[stages, turns of one]`."""
        arrivals: list[list[tf.Tensor]] = [[] for _ in range(self._num_stages)]
        ends: list[list[tf.Tensor]] = [[] for _ in range(self._num_stages)]
        there = [*range(self._num_stages)]
        for number in range(self._num_micro_batches):
            before = begin
            for stage, back in [(i, False) for i in there] + [(i, True) for i in there[::-1]]:
                tensors = turns.get((stage, number, back))
                arrivals[stage].append(before)
                before = _when(tensors) if tensors else before
                ends[stage].append(before)
        return tf.stack(arrivals), tf.stack(ends)


def _lengths(begin: tf.Tensor, arrivals: tf.Tensor, ends: tf.Tensor) -> tf.Tensor:
    """Returns how long turns took, in the order in which their stage ended them."""
    by_end = tf.argsort(ends, axis=1, stable=True)
    arrivals, ends = (tf.gather(times, by_end, batch_dims=1) for times in (arrivals, ends))
    before = tf.concat([tf.fill([ends.shape[0], 1], begin), ends[:, :-1]], axis=1)
    return tf.nn.relu(ends - tf.maximum(before, arrivals))


def _when(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the time at which a device has computed tensors.

    It is told when an element of the last one has come to the host, also from a GPU.
    """
    with tf.control_dependencies(tensors), tf.device(tensors[-1].device):
        there = tf.reshape(tensors[-1], [-1])[:1]
    clock = _clock(there.dtype, computes_in_one_order())
    if tf.executing_eagerly():
        return clock(there)
    clock.add_to_graph(tf.compat.v1.get_default_graph())
    (told,) = tf.raw_ops.PartitionedCall(args=[there], Tout=[tf.float64], f=clock)
    return tf.ensure_shape(told, [])


@functools.cache
def _clock(dtype: tf.DType, in_one_order: bool) -> Any:
    """Returns a function of a vector that tells when this is there.

    Clocks of one graph would be read in the order in which they were traced, each waiting for those
    before it, as all operations with effects; in a function that is called as one without, not.
    """
    del in_one_order  # `now` asks for it: a function that was made is for one answer

    def time_after(vector: tf.Tensor) -> tf.Tensor:
        # On a GPU a slice alone would count as done once it is in the GPU's queue.
        with tf.device("CPU:0"), tf.control_dependencies([read_by_host(vector)]):
            return now()

    return tf.function(time_after, autograph=False).get_concrete_function(
        tf.TensorSpec([None], dtype)
    )
