"""The inner loop: many steps per call, in the graph.

The batch is taken before a step begins, so that the end of the data ends the loop without half a
step: `optimizer.iterations`, schedules and seeds count exactly the steps that were made.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tfdist.cluster.remote import connection
from tfdist.strategies.batches import Element, Share, combined_checksum
from tfdist.upstream.tensorflow_calls import RepeatedCalls
from tfdist.upstream.tensorflow_graphs import free_with
from tfdist.upstream.tensorflow_random import draws_at_trace_warned
from tfdist.upstream.tensorflow_runtime import computes_in_one_order


class LoopResult(NamedTuple):
    """What a call of the loop has done."""

    num_steps: Any  # int32 scalar
    num_rows: Any  # in those steps; int64 scalar
    seconds_waited: Any  # seconds that the devices waited for data; float64 scalar
    checksum: Any = 0  # of their batches; int64 scalar
    num_read: Any = 0  # batches with rows that this process brought, if it has its own; int64


Logs = dict[str, Any]

#: Takes an iterator and the largest number of steps, int32; returns what was done, and the logs.
LoopFn = Callable[[Iterator[Any], tf.Tensor], tuple[LoopResult, Logs]]

#: Turns what an iterator yields into the batch of the next step; called by all workers.
Receive = Callable[[Any], Element]


#: The result so far, the time at which the last step was done, and whether data may be left: int32,
#: 1 or 0, because a GPU keeps booleans in its own memory and int32 in the host's. What a loop need
#: not count is a number of Python: each variable of a loop costs three operations per step.
State = tuple[LoopResult, tf.Tensor, Any]

#: Takes a batch, and makes a step if there is one.
Take = Callable[[LoopResult, tf.Tensor, Any], State]

#: Calls a function on a state, up to a number of times; given a context with the numbers' device.
Repeat = Callable[[Take, State, tf.Tensor, Callable[[], Any]], State]


class Step(Protocol):
    """What a loop repeats; called outside of the replicas."""

    training: bool  # whether the step changes weights

    def __call__(self, total_rows: tf.Tensor, shares: Sequence[Share]) -> Any:
        """Makes one step on the per-replica batches of a global batch of `total_rows` rows.

        Returns tensors that are ready when the step has been made.
        """

    def logs(self) -> Logs:
        """Returns the logs after the steps: metrics over all of them."""


class End(enum.Enum):
    """How a loop detects the end of the data."""

    OF_ITERATOR = enum.auto()
    WITHOUT_ROWS = enum.auto()  # a global batch has no rows: the data of all workers have ended


#: Returns the function that makes steps: `in_graph`, `one_step_in_graph` or `eager`.
Loop = Callable[[Receive, Step, End | None, bool], LoopFn]


def in_graph(receive: Receive, step: Step, end: End | None, has_checksums: bool) -> LoopFn:
    """Returns a loop of steps, and the logs after it, as one `tf.function`.

    Args:
        receive: Makes a global batch from what the iterator yields.
        step: The step to repeat.
        end: How to detect the end of the data; None: there are enough data for all steps. Checking
            at each step makes a tiny network a quarter slower.
        has_checksums: Whether to return a checksum of the batches.
    """
    return _compiled(receive, step, end, has_checksums, _repeatedly)


def one_step_in_graph(receive: Receive, step: Step, end: End | None, has_checksums: bool) -> LoopFn:
    """Returns `in_graph`'s function for calls of one step each, which needs no loop.

    A loop around a single step makes a small network up to a third slower on two devices, because
    each device has its own loop.
    """
    return _compiled(receive, step, end, has_checksums, _once)


def _compiled(
    receive: Receive, step: Step, end: End | None, has_checksums: bool, repeat: Repeat
) -> LoopFn:
    graphs: list[tf.Graph] = []

    # Branches return their results on the first GPU, whatever the device they were computed on.
    numbers_on: Callable[[], Any] = nullcontext if end else on_host

    def run(iterator: Any, num_steps: tf.Tensor) -> tuple[LoopResult, Logs]:
        if not tf.executing_eagerly():
            graphs.append(tf.compat.v1.get_default_graph())

        def take(result: LoopResult, last_done_at: tf.Tensor, _: Any) -> State:
            batch, has_batch, ready_at = _next(iterator, end)
            if end is End.WITHOUT_ROWS:
                batch = receive(batch)
                has_batch = batch.num_rows > 0
                result = _brought(result, batch)

            def make_step() -> tuple[LoopResult, tf.Tensor]:
                element = batch
                if end is not End.WITHOUT_ROWS:
                    element_or_optional = batch.get_value() if end else batch
                    element = receive(_from_then_on(ready_at, element_or_optional))
                done = step(element.num_rows, element.shares)
                with numbers_on():
                    # Data that were ready before the last step was done kept nobody waiting.
                    waited = result.seconds_waited + tf.maximum(ready_at - last_done_at, 0)
                    done_at = time_after(_leaves(done))
                    with tf.control_dependencies(read_first(_leaves(done), done_at)):
                        return _after(result, element, waited), done_at

            if end is None:
                return *make_step(), 1
            with on_host():
                more = tf.cast(has_batch, tf.int32)
            return *tf.cond(has_batch, make_step, lambda: (result, last_done_at)), more

        with numbers_on():
            state = _nothing(end, has_checksums), now(), tf.constant(1) if end else 1
        with draws_at_trace_warned() if graphs else nullcontext():
            result, _, _ = repeat(take, state, num_steps, numbers_on)
        # Of what a step changes the graph does not know everything: see `step.one_trace`. A metric
        # may tell its variable itself, which is to be read here, too.
        with tf.control_dependencies([result.num_rows]):
            return result, tf.nest.map_structure(tf.convert_to_tensor, step.logs())

    function = tf.function(run, reduce_retracing=True, autograph=False)
    free_with(function, graphs)
    return RepeatedCalls(function)


def on_host() -> Any:
    """Returns a context for the loop's own numbers, which TensorFlow would put on the first GPU.

    There, the host would wait in each iteration until the GPU has made the step before, and the GPU
    until the host has queued the next one.
    """
    return tf.device(connection.on_this_host("CPU:0"))


def _repeatedly(
    take: Take, state: State, num_steps: tf.Tensor, numbers_on: Callable[[], Any]
) -> State:
    """Takes batches until a number of steps was made or the data have ended."""
    counted = [leaf for leaf in _leaves(state) if tf.is_tensor(leaf)]
    with ExitStack() as traced:  # left open for the identities that TensorFlow appends to results

        def whole(values: Sequence[tf.Tensor]) -> State:
            rest = iter(values)
            return tf.nest.map_structure(
                lambda leaf: next(rest) if tf.is_tensor(leaf) else leaf, state
            )

        def goes_on(*before: tf.Tensor) -> Any:
            traced.enter_context(on_host())
            *_, more = whole(before)
            return tf.convert_to_tensor(more) > 0

        def body(*before: tf.Tensor) -> list[tf.Tensor]:
            after = _leaves(take(*whole(before)))
            traced.enter_context(numbers_on())
            pairs = zip(after, _leaves(state), strict=True)
            return [new for new, old in pairs if tf.is_tensor(old)]

        result, *rest = whole(tf.while_loop(goes_on, body, counted, maximum_iterations=num_steps))
    if not tf.is_tensor(result.num_steps):
        result = result._replace(num_steps=num_steps)
    return result, *rest


def _once(take: Take, state: State, num_steps: tf.Tensor, numbers_on: Callable[[], Any]) -> State:
    del num_steps, numbers_on
    return take(*state)


def _next(iterator: Any, end: End | None) -> tuple[Any, tf.Tensor, tf.Tensor]:
    """Takes a batch, in an Optional where the data may end; whether there is one; when it came."""
    if end is End.OF_ITERATOR:
        batch = iterator.get_next_as_optional()
        arrived = has_batch = batch.has_value()
    else:
        batch = iterator.get_next()
        arrived = next(t for t in _leaves(batch) if t is not None)
        with on_host():
            has_batch = tf.constant(True)
    with on_host(), tf.control_dependencies([arrived]):
        return batch, has_batch, now()


def _from_then_on(ready_at: tf.Tensor, batch: Any) -> Any:
    """Returns a batch that is there when the clock has been read.

    Otherwise the step may take all threads first, and its own time would seem to have been a wait.
    """
    if tf.executing_eagerly():
        return batch

    def same(leaf: Any) -> Any:
        if not tf.is_tensor(leaf):
            return leaf
        # An iterator's outputs have no device yet while the loop is traced: they are colocated with
        # the iterator. By `leaf.device` a batch would travel to the default device and back.
        with tf.compat.v1.get_default_graph().colocate_with(leaf.op):
            return tf.identity(leaf)

    with tf.control_dependencies([ready_at]):
        return tf.nest.map_structure(same, batch, expand_composites=True)


def eager(receive: Receive, step: Step, end: End | None, has_checksums: bool) -> LoopFn:
    """Returns `in_graph`'s loop in Python, for `run_eagerly=True`: slow, open to a debugger."""

    def run(iterator: Iterator[Any], num_steps: tf.Tensor) -> tuple[LoopResult, Logs]:
        result = _nothing(end, has_checksums)
        for _ in range(int(num_steps)):
            began = time.perf_counter()
            try:
                element_or_optional = next(iterator)
            except StopIteration:
                break
            waited = result.seconds_waited + time.perf_counter() - began
            element = receive(element_or_optional)
            if end is End.WITHOUT_ROWS:
                result = _brought(result, element)
                if element.num_rows == 0:
                    break
            step(element.num_rows, element.shares)
            result = _after(result, element, waited)
        return result, step.logs()

    return run


def _nothing(end: End | None, has_checksums: bool) -> LoopResult:
    zero = tf.constant(0, tf.int64)
    return LoopResult(
        num_steps=tf.constant(0) if end else 0,
        num_rows=zero,
        seconds_waited=tf.constant(0.0, tf.float64),
        checksum=zero if has_checksums else 0,
        num_read=zero if end is End.WITHOUT_ROWS else 0,
    )


def _brought(result: LoopResult, element: Element) -> LoopResult:
    """Counts a batch of which this process brought rows, whether a step follows or not."""
    own_rows = tf.add_n([share.num_rows for share in element.shares])
    return result._replace(num_read=result.num_read + tf.cast(own_rows > 0, tf.int64))


def _after(result: LoopResult, element: Element, waited: Any) -> LoopResult:
    checksum = result.checksum
    return result._replace(
        num_steps=result.num_steps + 1,
        num_rows=result.num_rows + tf.cast(element.num_rows, tf.int64),
        seconds_waited=waited,
        checksum=combined_checksum(checksum, element.checksum) if tf.is_tensor(checksum) else 0,
    )


def _leaves(structure: Any) -> list[Any]:
    return tf.nest.flatten(structure, expand_composites=True)


def now() -> tf.Tensor:
    """Returns the time in seconds, float64; only differences of two readings have a meaning.

    TensorFlow refuses its own clock where operations have to be deterministic. Python's clock costs
    a few microseconds more and works there. No number that is trained depends on either.
    """
    if computes_in_one_order():
        return tf.ensure_shape(tf.numpy_function(time.monotonic, [], tf.float64), [])
    return tf.timestamp()


def time_after(tensors: Sequence[tf.Tensor | None]) -> tf.Tensor:
    """Returns the time at which the devices have computed the tensors, as `now`.

    For the graph, and for control edges, a GPU's operation is over once it is in the GPU's queue.
    A value that the host reads exists only when the GPU has computed it.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    with tf.control_dependencies(
        [read_by_host(t) if _runs_ahead(t.device) else t for t in present]
    ):
        return now()


def read_first(tensors: Sequence[tf.Tensor | None], after: tf.Tensor) -> Sequence[tf.Tensor]:
    """Returns what a loop has to wait for before it starts the next step.

    Args:
        tensors: What devices compute.
        after: The time at which they have done so. On CPUs the loop waits for it, or the next step
            might take all threads before the clock is read. On GPUs the graph runs ahead instead.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    return present if any(_runs_ahead(tensor.device) for tensor in present) else [after]


def read_by_host(tensor: tf.Tensor) -> tf.Operation:
    """Makes the host of a tensor read its first element, so that the tensor is computed.

    TensorFlow's graph optimizer removes an unused copy, or replaces it with a control edge. It
    keeps the data of an assertion, since the assertion may have to print them.
    """
    with tf.device(tensor.device):
        first = tf.reshape(tensor, [-1])[:1]
    host = tf.DeviceSpec.from_string(tensor.device).replace(device_type="CPU", device_index=0)
    with tf.device(host):
        return tf.raw_ops.Assert(condition=True, data=[first])


def _runs_ahead(device: str) -> bool:
    """Returns whether the graph continues before the device has computed what it was given."""
    return tf.DeviceSpec.from_string(device).device_type == "GPU"
