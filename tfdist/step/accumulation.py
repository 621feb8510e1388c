"""Accumulation: of the rounds of a step (`over_rounds`), and of steps (`GradientAccumulation`).

The trainer's `accumulate` cuts a per-replica batch into microbatches that are computed one after
the other, so that only one of them needs memory. A loss that divides by something other than rows
(a mask, weights) needs that total before the first gradient: only then does a forward pass over
all rounds precede.

Keras defines an optimizer's `gradient_accumulation_steps` as follows: the gradients of K batches
are averaged, whatever the sizes of the batches, and every K-th batch changes the weights. Each
replica keeps the sum of its own gradients, and only the K-th batch sends it. The Keras optimizer
is still called for every batch, because it counts, averages and constrains: with zeros in between,
and with the sum of all K batches at the end, to which its own accumulators add nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.groups.fusion import local_sum
from tfdist.precision import Scaling
from tfdist.step.forward_backward import ReplicaOutputs, all_reduced
from tfdist.step.replica import Totals
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share, share
from tfdist.upstream.keras_optimizers import num_batches_seen

#: (replica, round, what it computes in that, totals) -> what that contributes
Compute = Callable[[int, Any, Share, Totals], ReplicaOutputs]


def over_rounds(
    strategy: Strategy, compute: Compute, shares: Sequence[Share], num_rounds: int
) -> list[ReplicaOutputs]:
    """Adds up what each replica of this process contributes in all rounds.

    Returns:
        The sums by replica, not yet exchanged.
    """

    def of_round(number: Any, totals: list[Totals]) -> list[ReplicaOutputs]:
        cut = [_microbatch(own, number, num_rounds) for own in shares]
        results = strategy.run(lambda i: compute(i, number, cut[i], totals[i]))
        return strategy.local_results(results)

    def noted(number: Any) -> tuple[list[list[tf.Tensor]], tuple[()]]:
        totals = [Totals() for _ in shares]
        of_round(number, totals)
        return [t.noted for t in totals], ()

    known: list[Any] = [None for _ in shares]
    local, _ = _in_rounds(noted, num_rounds)
    if local[0]:
        known = strategy.local_results(strategy.run(lambda i: strategy.all_reduce(local[i])))

    def computed(number: Any) -> tuple[list[ReplicaOutputs], list[ReplicaOutputs]]:
        each = of_round(number, [Totals(known=k) for k in known])
        return [share.summable() for share in each], [share.same() for share in each]

    sums, same = _in_rounds(computed, num_rounds)
    return [total.with_same(each) for total, each in zip(sums, same, strict=True)]


def _in_rounds(fn: Callable[[Any], tuple[Any, Any]], num_rounds: int) -> tuple[Any, Any]:
    """Returns the sum of what a function of a round's number returns first, and the rest once.

    Its graph, which has the model's for each replica, is traced once and is there once: TensorFlow
    needs the more time to make and to optimize a graph, the larger it is. One that returns nothing
    is left out.

    Args:
        fn: Returns two structures, of tensors and slices; the second is the same in each round.
        num_rounds: In which to call it.
    """
    if tf.executing_eagerly():
        parts, same = zip(*(fn(number) for number in range(num_rounds)), strict=True)
        return tf.nest.map_structure(lambda *terms: local_sum(terms), *parts), same[0]
    traced = tf.function(fn, autograph=False).get_concrete_function(tf.TensorSpec([], tf.int32))
    like = traced.structured_outputs
    if not tf.nest.flatten(like):
        return like

    def add(number: tf.Tensor, sums: Any, _: Any) -> tuple[tf.Tensor, Any, Any]:
        # TensorFlow returns plain tuples, whatever they were.
        more, same = tf.nest.pack_sequence_as(like, tf.nest.flatten(traced(number)))
        sums = tf.nest.map_structure(_plus, sums, more)
        return number + 1, sums, same

    begin = tf.constant(0), *tf.nest.map_structure(_none_yet, like)
    shapes = tf.TensorShape([]), *tf.nest.map_structure(_shape, like)
    # One after the other, or several would need memory at a time.
    in_turn = {"parallel_iterations": 1}
    _, sums, same = tf.while_loop(lambda n, *_: n < num_rounds, add, begin, shapes, **in_turn)
    return sums, same


def _microbatch(own: Share, number: Any, num_rounds: int) -> Share:
    """Returns what a replica computes of its share in one round."""
    rows = own.num_rows
    return share(own.rows, rows * number // num_rounds, rows * (number + 1) // num_rounds)


def _plus(total: Any, more: Any) -> Any:
    """Adds what a round returns to the sum of those before it."""
    if isinstance(more, tf.IndexedSlices) or more.shape.is_fully_defined():
        return local_sum([total, more])
    missing = tf.shape(more) - tf.shape(total)  # before the first round
    return more + tf.pad(total, tf.stack([tf.zeros_like(missing), missing], 1))


def _none_yet(value: Any) -> Any:
    """Zeros in the form of what a round returns, as few as may be, or slices of no row."""
    if not isinstance(value, tf.IndexedSlices):
        return tf.zeros([size or 0 for size in value.shape], value.dtype)
    values = tf.zeros([0, *value.values.shape[1:]], value.dtype)
    return tf.IndexedSlices(values, tf.zeros([0], value.indices.dtype), tf.constant([*value.shape]))


def _shape(value: Any) -> Any:
    """The shape of a sum in all rounds: slices become more."""
    if not isinstance(value, tf.IndexedSlices):
        return value.shape
    shape = tf.TensorShape([None, *value.values.shape[1:]])
    return tf.IndexedSlicesSpec(shape, value.dtype, value.indices.dtype, tf.int32, [None])


Gradients = dict[int, Any]  # by place among the trainable variables


class GradientAccumulation:
    """The sums of gradients that wait on each replica of this process for the K-th batch.

    Args:
        strategy: Runs the replicas.
        scaling: Scales the loss; its optimizer accumulates.
        trainable: The variables that the optimizer trains.

    Attributes:
        waiting: The sums, by replica of this process and by variable.
    """

    def __init__(
        self, strategy: Strategy, scaling: Scaling, trainable: list[keras.Variable]
    ) -> None:
        self._strategy, self._scaling, self._trainable = strategy, scaling, trainable
        self._every = scaling.optimizer.gradient_accumulation_steps
        self.waiting = [
            [_zeros(variable, strategy.place_of(variable, index)) for variable in trainable]
            for index in range(strategy.num_local_replicas)
        ]

    def has_waiting(self) -> bool:
        """Tells whether gradients wait now; called outside of any graph."""
        return int(num_batches_seen(self._scaling.optimizer)) % self._every > 0

    def summed(self, local: list[ReplicaOutputs]) -> Any:
        """Sums the contributions of all replicas, but keeps the gradients until the K-th batch.

        Args:
            local: Of each replica of this process.

        Returns:
            The sums on each replica, as `Strategy.run` returns them. The gradients are those of K
            batches, zeros in between, and NaN for a batch that is to be skipped.
        """
        strategy = self._strategy

        def but_gradients(i: int) -> tuple[ReplicaOutputs, tf.Tensor]:
            rest = local[i]._replace(gradients={}, indices={})
            overflows = self._scaling.overflows(list(local[i].gradients.values()))
            sums, overflows = all_reduced(strategy, (rest.summable(), overflows))
            return sums.with_same(rest), overflows

        rest = strategy.local_results(strategy.run(but_gradients))
        own = [share.gradients_of(self._trainable) for share in local]
        gradients = self._add(own, [overflows for _, overflows in rest])
        return strategy.run(lambda i: rest[i][0]._replace(gradients=gradients[i]))

    def _add(self, local: list[Gradients], overflows: Sequence[tf.Tensor]) -> list[Gradients]:
        """Adds a batch's gradients; on the K-th batch, sums them over the replicas.

        Args:
            local: Gradients by replica, scaled; dense or `tf.IndexedSlices`.
            overflows: By replica: how many gradients, over all workers, are not finite. Each
                replica uses the sum that it has itself: a sum that nobody uses is pruned, and the
                other replicas would wait for it forever.
        """
        finite = [number == 0 for number in overflows]
        waiting = [
            {i: own[i] for i in gradients}
            for own, gradients in zip(self.waiting, local, strict=True)
        ]
        for gradients, own, is_finite in zip(local, waiting, finite, strict=True):
            for i, gradient in gradients.items():
                with tf.device(own[i].device):
                    unscaled = self._scaling.unscale([tf.convert_to_tensor(gradient)])[0]
                    own[i].assign_add(tf.where(is_finite, unscaled, 0.0))
        num_batches = num_batches_seen(self._scaling.optimizer)
        is_last = finite[0] & ((num_batches + 1) % self._every == 0)
        # Branches return nothing: what `tf.cond` returns is merged on one device, to which the
        # gradients of all replicas would travel.
        tf.cond(is_last, lambda: self._exchange(waiting), tf.no_op)

        def of_batch(variable: tf.Variable, is_finite: tf.Tensor) -> tf.Tensor:
            nothing = tf.cast(tf.where(is_finite, 0.0, float("nan")), variable.dtype)
            return tf.where(is_last, variable.read_value(), nothing)

        totals = [
            {i: _on_its_device(of_batch, variable, is_finite) for i, variable in own.items()}
            for own, is_finite in zip(waiting, finite, strict=True)
        ]
        with tf.control_dependencies(tf.nest.flatten(totals)):
            tf.cond(is_last, lambda: _clear(tf.nest.flatten(waiting)), tf.no_op)
        return totals

    def _exchange(self, waiting: list[dict[int, tf.Variable]]) -> tf.Operation:
        """Replaces what has been waiting by its sum over the replicas."""
        strategy = self._strategy

        def scaled(variable: tf.Variable) -> tf.Tensor:
            value = variable.read_value()
            # The scale is float32, which would widen gradients of float16.
            return (
                tf.cast(self._scaling.scale(value), value.dtype) if self._scaling.active else value
            )

        values = tf.nest.map_structure(lambda v: _on_its_device(scaled, v), waiting)
        totals = strategy.local_results(strategy.run(lambda i: all_reduced(strategy, values[i])))
        assigned = tf.nest.map_structure(lambda v, total: v.assign(total), waiting, totals)
        return tf.group(tf.nest.flatten(assigned))


def _on_its_device(fn: Callable[..., tf.Tensor], variable: tf.Variable, *more: Any) -> tf.Tensor:
    """Calls `fn(variable, *more)` with the variable's device as the default one."""
    with tf.device(variable.device):
        return fn(variable, *more)


def _clear(variables: Sequence[tf.Variable]) -> tf.Operation:
    return tf.group([_on_its_device(lambda v: v.assign(tf.zeros_like(v)), v) for v in variables])


def _zeros(variable: keras.Variable, device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
