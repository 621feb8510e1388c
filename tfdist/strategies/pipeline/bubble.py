"""The bubble: the share of time that stages wait while a pipeline fills and empties.

With n stages of equal cost and m micro-batches a step takes m + n - 1 turns, in m of which a stage
computes (Huang et al. 2019, "GPipe", section 2.3). One forward, one backward (Narayanan et al.
2019, "PipeDream") has the same bubble and keeps fewer micro-batches in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.clock import now, read_by_host
from tfdist.strategies.pipeline.order import Order
from tfdist.strategies.pipeline.schedule import Kind, Pass, device_of, input_of, turns
from tfdist.upstream.tensorflow_runtime import computes_in_one_order


def used(num_stages: int, num_micro_batches: int) -> float:
    """Returns the share of the time that a stage computes, if all stages cost the same."""
    return num_micro_batches / (num_micro_batches + num_stages - 1)


def planned_speed_up(
    shares: Sequence[float], num_micro_batches: int, order: str, num_devices: int
) -> float:
    """Returns the largest possible speed-up over one device, in an order of the stages.

    With v equal stages on each of n devices, m a multiple of n, `"interleaved"` takes the time of
    m + (n - 1) / v turns; with n equal stages and m > n, `"zb"` that of m + n / 3.

    Args:
        shares: Each stage's share of the work; they sum to 1.
        num_micro_batches: Micro-batches per batch.
        order: As for `schedule.turns`.
        num_devices: The number of devices.
    """
    if order in ("gpipe", "1f1b"):
        return speed_up(shares, num_micro_batches)
    return 1 / max(turn.end for turn in turns(shares, num_micro_batches, order, num_devices))


def speed_up(shares: Sequence[float], num_micro_batches: int) -> float:
    """Returns the largest possible speed-up over one device.

    The most expensive stage sets the pace: m - 1 turns of it, and one turn of each stage.

    Args:
        shares: Each stage's share of the work; they sum to 1.
        num_micro_batches: Micro-batches per batch.
    """
    return num_micro_batches / ((num_micro_batches - 1) * max(shares) + sum(shares))


class MeasuredBubble:
    """Measures, over the steps of a process, how long its stages computed and how long steps took.

    A stage computes from the moment its inputs are there and its previous turn is over until the
    end of its turn, and waits otherwise. Sharing cores or a link makes turns longer, not the
    bubble.

    Args:
        num_stages: The number of stages.
        num_micro_batches: Micro-batches per batch.
        num_devices: The number of devices, which take the stages in turns; None: one for each.
    """

    def __init__(
        self, num_stages: int, num_micro_batches: int, num_devices: int | None = None
    ) -> None:
        self._num_stages, self._num_micro_batches = num_stages, num_micro_batches
        self._num_devices = num_devices or num_stages
        self._seconds: tf.Variable | None = None

    def prepare(self) -> None:
        """Creates the variable with the sums; called outside of any graph."""
        if self._seconds is None:
            with tf.device("CPU:0"):
                self._seconds = tf.Variable(tf.zeros([2], tf.float64), name="computing_and_all")

    def share(self) -> float | None:
        """Returns the share of the stages' time that they waited; None if nothing was measured.

        Only steps with a backward pass count.
        """
        if self._seconds is None:
            return None
        computing, total = self._seconds.numpy()
        return 1 - computing / total if total > 0 else None

    def note(self, inputs: Sequence[tf.Tensor], order: Order) -> None:
        """Adds the measurement of a step to the graph; called when all of the step is traced.

        Args:
            inputs: Inputs of its first micro-batch; without dense ones nothing is measured.
            order: The order of the step; without backward passes nothing is measured.
        """
        turns = order.turns()
        if self._seconds is None or not inputs or all(kind == "forward" for _, _, kind in turns):
            return
        with tf.device("CPU:0"):
            begin = _time_of(inputs)
            arrivals, ends = self._times(begin, turns)
            # Nothing waits for the clock at the begin, so it may be read after turns have ended.
            begin = tf.minimum(begin, tf.reduce_min(ends))
            computing = tf.reduce_sum(_lengths(begin, arrivals, ends))
            total = self._num_devices * (tf.reduce_max(ends) - begin)
            self._seconds.assign_add([computing, total])

    def _times(
        self, begin: tf.Tensor, turns: Mapping[Pass, Sequence[tf.Tensor]]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns when the inputs of each turn arrived and when it ended: `[devices, turns]`."""
        arrivals: list[list[tf.Tensor]] = [[] for _ in range(self._num_devices)]
        ends: list[list[tf.Tensor]] = [[] for _ in range(self._num_devices)]
        known: dict[Pass | None, tf.Tensor] = {None: begin}
        for own in self._passes({kind for _, _, kind in turns}):
            arrival = known[input_of(own, self._num_stages)]
            tensors = turns.get(own)
            known[own] = _time_of(tensors) if tensors else arrival
            device = device_of(own.stage, self._num_devices)
            arrivals[device].append(arrival)
            ends[device].append(known[own])
        return tf.stack(arrivals), tf.stack(ends)

    def _passes(self, kinds: Collection[Kind]) -> Iterator[Pass]:
        """Returns the passes of these kinds, as many on each device, each after its input."""
        for number in range(self._num_micro_batches):
            stages = range(self._num_stages)
            yield from (Pass(stage, number, "forward") for stage in stages)
            yield from (Pass(stage, number, "backward") for stage in reversed(stages))
            if "weights" in kinds:
                yield from (Pass(stage, number, "weights") for stage in stages)


def _lengths(begin: tf.Tensor, arrivals: tf.Tensor, ends: tf.Tensor) -> tf.Tensor:
    """Returns the length of each turn, in the order in which its stage finished them."""
    by_end = tf.argsort(ends, axis=1, stable=True)
    arrivals, ends = (tf.gather(times, by_end, batch_dims=1) for times in (arrivals, ends))
    before = tf.concat([tf.fill([ends.shape[0], 1], begin), ends[:, :-1]], axis=1)
    return tf.nn.relu(ends - tf.maximum(before, arrivals))


def _time_of(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the time at which a device has computed tensors.

    The clock is read when an element of the last tensor has reached the host, also from a GPU.
    """
    with tf.control_dependencies(tensors), tf.device(tensors[-1].device):
        there = tf.reshape(tensors[-1], [-1])[:1]
    clock = _clock(there.dtype, computes_in_one_order())
    if tf.executing_eagerly():
        return clock(there)
    clock.add_to_graph(tf.compat.v1.get_default_graph())
    (time,) = tf.raw_ops.PartitionedCall(args=[there], Tout=[tf.float64], f=clock)
    return tf.ensure_shape(time, [])


@functools.cache
def _clock(dtype: tf.DType, in_one_order: bool) -> Any:
    """Returns a function of a vector that reads the clock when the vector is computed.

    Clocks of one graph would be read in the order in which they were traced, each waiting for those
    before it, as all stateful operations are. Inside a function that is called as stateless, they
    are not.
    """
    del in_one_order  # part of the cache's key: `now` asks for it while the function is traced

    def time_after(vector: tf.Tensor) -> tf.Tensor:
        # On a GPU a slice alone would count as done once it is in the GPU's queue.
        with tf.device("CPU:0"), tf.control_dependencies([read_by_host(vector)]):
            return now()

    return tf.function(time_after, autograph=False).get_concrete_function(
        tf.TensorSpec([None], dtype)
    )
