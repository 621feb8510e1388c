"""Gradient accumulation, over rounds within a batch and over batches.

`Trainer(accumulate=N)` splits each replica's batch into N microbatches that are computed one after
the other, so that only one of them needs memory at a time (`over_rounds`).
`gradient_accumulation_steps=K` of a Keras optimizer averages the gradients of K batches
(`GradientAccumulation`). Both all-reduce once per optimizer step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.groups.fusion import local_sum
from tfdist.replica.replica import Totals
from tfdist.step.forward_backward import ReplicaOutputs, all_reduce
from tfdist.step.loss_scaling import HALF_OVERFLOW, Scaling
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share, share
from tfdist.upstream.keras_optimizers import num_batches_seen
from tfdist.upstream.tensorflow_graphs import outputs_where_computed

#: (replica, round, its rows in that round, totals) -> the replica's outputs
Compute = Callable[[int, Any, Share, Totals], ReplicaOutputs]

Gradients = dict[int, Any]  # by place among the trainable variables


def over_rounds(
    strategy: Strategy, compute: Compute, shares: Sequence[Share], num_rounds: int
) -> list[ReplicaOutputs]:
    """Sums what each replica of this process computes in all rounds.

    A loss that divides by something other than rows (a mask, weights) needs that total over all
    rounds before the first gradient. Only then a forward pass over all rounds runs first.

    Returns:
        The sums by replica, not yet all-reduced.
    """

    def of_round(number: Any, totals: list[Totals]) -> list[ReplicaOutputs]:
        def on_replica(i: int) -> ReplicaOutputs:
            batch = shares[i]
            rows = batch.num_rows
            cut = share(batch.rows, rows * number // num_rounds, rows * (number + 1) // num_rounds)
            first_row = cut.first_row + tf.cast(batch.first_row, tf.int64)
            return compute(i, number, cut._replace(first_row=first_row), totals[i])

        return strategy.local_results(strategy.run(on_replica))

    def noted(number: Any) -> tuple[list[list[tf.Tensor]], list[tuple[()]]]:
        totals = [Totals() for _ in shares]
        of_round(number, totals)
        return [t.noted for t in totals], [() for _ in shares]

    totals_of_rounds: list[Any] = [None for _ in shares]
    local, _ = _summed_over_rounds(strategy, noted, num_rounds)
    if local[0]:
        totals_of_rounds = strategy.local_results(
            strategy.run(lambda i: strategy.all_reduce(local[i]))
        )

    def computed(number: Any) -> tuple[list[ReplicaOutputs], list[ReplicaOutputs]]:
        each = of_round(number, [Totals(known=k) for k in totals_of_rounds])
        return [outputs.summable() for outputs in each], [outputs.same() for outputs in each]

    sums, same = _summed_over_rounds(strategy, computed, num_rounds)
    return [total.with_same(each) for total, each in zip(sums, same, strict=True)]


class GradientAccumulation:
    """`gradient_accumulation_steps` of a Keras optimizer, with one all-reduce per K batches.

    As in Keras, the gradients of K batches are averaged, whatever the sizes of the batches, and
    every K-th batch updates the weights. Each replica keeps its own part of the sum, which is
    all-reduced with the K-th batch. The Keras optimizer is still called for every batch, because
    it counts them, averages weights, and applies constraints: with zeros in between, and with the
    sum of all K batches at the end, to which its own accumulators add nothing.

    Attributes:
        waiting: The sums so far, by replica of this process and by variable.
    """

    def __init__(
        self, strategy: Strategy, scaling: Scaling, trainable: list[keras.Variable]
    ) -> None:
        self._strategy, self._scaling, self._trainable = strategy, scaling, trainable
        self._every = scaling.optimizer.gradient_accumulation_steps
        self.waiting = [
            [
                _zeros(variable, strategy.variables.place_of(variable, index))
                for variable in trainable
            ]
            for index in range(strategy.num_local_replicas)
        ]

    def has_pending(self) -> bool:
        """Returns whether gradients are waiting now; called outside of any graph."""
        return int(num_batches_seen(self._scaling.optimizer)) % self._every > 0

    def all_reduced(self, local: list[ReplicaOutputs]) -> Any:
        """Sums outputs over all replicas, but keeps gradients back until the K-th batch.

        Returns:
            The sums on each replica, in the form of `Strategy.run`. The gradients are those of K
            batches, zeros in between, and NaN for a batch that overflowed.
        """
        strategy = self._strategy

        def all_but_gradients(i: int) -> tuple[ReplicaOutputs, tf.Tensor, tf.Tensor]:
            rest = local[i]._replace(gradients={}, indices={})
            overflows = self._scaling.overflows(local[i].gradients | local[i].overwritten)
            # Only where a part is that large, the sum can be too large for float16.
            limit = HALF_OVERFLOW / strategy.num_replicas
            near = self._scaling.overflows(local[i].gradients, limit)
            sums, overflows, near = all_reduce(strategy, (rest.summable(), overflows, near))
            return sums.with_same(rest), overflows, near

        def of_sums() -> list[tf.Tensor]:
            def on_replica(i: int) -> tf.Tensor:
                parts = {n: g for n, g in local[i].gradients.items() if isinstance(g, tf.Tensor)}
                return self._scaling.overflows(all_reduce(strategy, parts), HALF_OVERFLOW)

            return strategy.local_results(strategy.run(on_replica))

        rest = strategy.local_results(strategy.run(all_but_gradients))
        overflows = [of_parts for _, of_parts, _ in rest]
        if self._scaling.in_half:
            more = tf.cond(rest[0][2] > 0, of_sums, lambda: [tf.constant(0) for _ in local])
            overflows = [
                of_parts + of_sum for of_parts, of_sum in zip(overflows, more, strict=True)
            ]
        gradients = [outputs.gradients_of(self._trainable) for outputs in local]
        released = self._add(gradients, overflows)
        return strategy.run(lambda i: rest[i][0]._replace(gradients=released[i]))

    def _add(self, local: list[Gradients], overflows: Sequence[tf.Tensor]) -> list[Gradients]:
        """Adds a batch's gradients to those waiting; returns the sums on the K-th batch.

        Args:
            local: Gradients by replica, scaled; dense or `tf.IndexedSlices`.
            overflows: Number of gradients, over all workers, that are not finite, by replica.
                Each replica uses its own copy of this sum: TensorFlow would prune a copy that is
                not used, and the other replicas would wait for it forever.
        """
        finite = [number == 0 for number in overflows]
        waiting = [
            {i: sums[i] for i in gradients}
            for sums, gradients in zip(self.waiting, local, strict=True)
        ]
        for gradients, sums, is_finite in zip(local, waiting, finite, strict=True):
            for i, gradient in gradients.items():
                with tf.device(sums[i].device):
                    unscaled = self._scaling.unscale([tf.convert_to_tensor(gradient)])[0]
                    sums[i].assign_add(tf.where(is_finite, unscaled, 0.0))
        num_batches = num_batches_seen(self._scaling.optimizer)
        is_last = finite[0] & ((num_batches + 1) % self._every == 0)
        # Branches return nothing: what `tf.cond` returns is merged on one device, to which the
        # gradients of all replicas would travel.
        tf.cond(is_last, lambda: self._exchange(waiting), tf.no_op)

        def of_batch(variable: tf.Variable, is_finite: tf.Tensor) -> tf.Tensor:
            nothing = tf.cast(tf.where(is_finite, 0.0, float("nan")), variable.dtype)
            return tf.where(is_last, variable.read_value(), nothing)

        totals = [
            {i: _on_its_device(of_batch, variable, is_finite) for i, variable in sums.items()}
            for sums, is_finite in zip(waiting, finite, strict=True)
        ]
        with tf.control_dependencies(tf.nest.flatten(totals)):
            cleared = functools.partial(_on_its_device, lambda v: v.assign(tf.zeros_like(v)))
            tf.cond(is_last, lambda: tf.group(*map(cleared, tf.nest.flatten(waiting))), tf.no_op)
        return totals

    def _exchange(self, waiting: list[dict[int, tf.Variable]]) -> tf.Operation:
        """Replaces the waiting gradients by their sums over the replicas."""
        strategy = self._strategy

        def scaled(variable: tf.Variable) -> tf.Tensor:
            value = variable.read_value()
            # The scale is float32, which would widen gradients of float16.
            return (
                tf.cast(self._scaling.scale(value), value.dtype) if self._scaling.active else value
            )

        values = tf.nest.map_structure(lambda v: _on_its_device(scaled, v), waiting)
        totals = strategy.local_results(strategy.run(lambda i: all_reduce(strategy, values[i])))
        assigned = tf.nest.map_structure(lambda v, total: v.assign(total), waiting, totals)
        return tf.group(tf.nest.flatten(assigned))


def _on_its_device(fn: Callable[..., tf.Tensor], variable: tf.Variable, *more: Any) -> tf.Tensor:
    """Calls `fn(variable, *more)` with the variable's device as the default one."""
    with tf.device(variable.device):
        return fn(variable, *more)


def _zeros(variable: keras.Variable, device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)


def _summed_over_rounds(
    strategy: Strategy, fn: Callable[[Any], tuple[list, list]], num_rounds: int
) -> tuple[list, list]:
    """Returns the sum of what a function of a round's number returns first, and the rest once.

    The function is traced once and is in the graph once, since TensorFlow's time to build and
    optimize a graph grows with its size. A function that returns no tensors is not called again.

    Args:
        strategy: Runs the replicas; the sums are kept on their devices.
        fn: Returns two lists by replica of this process, of structures of tensors and
            `tf.IndexedSlices`; the second list is the same in every round.
        num_rounds: Number of rounds.
    """
    if tf.executing_eagerly():
        parts, same = zip(*(fn(number) for number in range(num_rounds)), strict=True)
        return tf.nest.map_structure(lambda *terms: local_sum(terms), *parts), same[0]
    with outputs_where_computed():
        traced = tf.function(fn, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))
    like = traced.structured_outputs
    if not tf.nest.flatten(like):
        return like

    def begin(i: int) -> tuple[Any, Any]:
        return tf.nest.map_structure(_initial, (like[0][i], like[1][i]))

    def add(number: tf.Tensor, sums: Any, _: Any) -> tuple[tf.Tensor, Any, Any]:
        # TensorFlow returns plain tuples in place of named ones.
        more, same = tf.nest.pack_sequence_as(like, tf.nest.flatten(traced(number)))

        def plus(i: int) -> Any:
            return tf.nest.map_structure(_plus, sums[i], more[i])

        return number + 1, strategy.local_results(strategy.run(plus)), same

    # On the replicas' devices: the loop keeps its variables where their initial values are.
    initial = strategy.local_results(strategy.run(begin))
    variables = tf.constant(0), [sums for sums, _ in initial], [same for _, same in initial]
    shapes = tf.TensorShape([]), *tf.nest.map_structure(_shape, like)
    # One round at a time, or several would need memory at once.
    sequential = {"parallel_iterations": 1}
    _, sums, same = tf.while_loop(
        lambda n, *_: n < num_rounds, add, variables, shapes, **sequential
    )
    return sums, same


def _plus(total: Any, more: Any) -> Any:
    """Adds what a round returns to the sum of the rounds before it."""
    if isinstance(more, tf.IndexedSlices) or more.shape.is_fully_defined():
        return local_sum([total, more])
    missing = tf.shape(more) - tf.shape(total)  # before the first round
    return more + tf.pad(total, tf.stack([tf.zeros_like(missing), missing], 1))


def _initial(value: Any) -> Any:
    """Returns zeros in the form of what a round returns; of unknown sizes, none."""
    if not isinstance(value, tf.IndexedSlices):
        return tf.zeros([size or 0 for size in value.shape], value.dtype)
    values = tf.zeros([0, *value.values.shape[1:]], value.dtype)
    return tf.IndexedSlices(values, tf.zeros([0], value.indices.dtype), tf.constant([*value.shape]))


def _shape(value: Any) -> Any:
    """Returns the shape of a sum in the loop: slices grow in number from round to round."""
    if not isinstance(value, tf.IndexedSlices):
        return value.shape
    shape = tf.TensorShape([None, *value.values.shape[1:]])
    return tf.IndexedSlicesSpec(shape, value.dtype, value.indices.dtype, tf.int32, [None])
