"""Accumulation: a step over several rounds, whose sums cross the replicas once.

A share is cut into microbatches that are computed one after the other, so that only one of them
needs memory. A loss that divides by something other than rows (a mask, weights) needs that total
before the first gradient: then a forward pass over all rounds goes ahead, and only then.

`gradient_accumulation_steps` of a Keras optimizer, with one exchange per optimizer step.

Keras's meaning: the gradients of K batches are averaged, whatever their sizes, and every K-th
batch changes the weights. Each replica keeps its own part of the sum; only the K-th batch sends
it. The Keras optimizer is still called for every batch (it counts, averages, constrains): with
zeros in between, and with the sum of all K batches at the end, to which its own accumulators add
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.precision import Scaling
from tfdist.step.forward_backward import ReplicaOutputs, all_reduced
from tfdist.step.replica import Totals
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share, share
from tfdist.strategies.collectives.local_sum import local_sum
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
        strategy: Of the replicas.
        scaling: Of the loss; its optimizer accumulates.
        trainable: The variables that it trains.

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
        """Adds up the contributions of all replicas, but keeps gradients until the K-th batch.

        Args:
            local: Of each replica of this process.

        Returns:
            The sums on each replica, as `Strategy.run` returns them. The gradients are those of K
            batches, zeros in between, and NaN for a batch that is to be left out.
        """
        strategy = self._strategy

        def but_gradients(i: int) -> tuple[ReplicaOutputs, tf.Tensor]:
            rest = local[i]._replace(gradients={}, indices={})
            overflows = self._scaling.overflows(list(local[i].gradients.values()))
            sums, overflows = all_reduced(strategy, (rest.summable(), overflows))
            return sums.with_same(rest), overflows

        rest = strategy.local_results(strategy.run(but_gradients))
        own = [share.gradients_of(self._trainable) for share in local]
        gradients = self._add(own, rest[0][1])
        return strategy.run(lambda i: rest[i][0]._replace(gradients=gradients[i]))

    def _add(self, local: list[Gradients], overflows: tf.Tensor) -> list[Gradients]:
        """Adds a batch's gradients; on the K-th batch, sums them over the replicas.

        Args:
            local: Gradients by replica, scaled; dense or `tf.IndexedSlices`.
            overflows: Number of replicas, over all workers, whose gradients are not finite.
        """
        finite = overflows == 0
        waiting = [
            {i: own[i] for i in gradients}
            for own, gradients in zip(self.waiting, local, strict=True)
        ]
        for gradients, own in zip(local, waiting, strict=True):
            for i, gradient in gradients.items():
                unscaled = self._scaling.unscale([tf.convert_to_tensor(gradient)])[0]
                own[i].assign_add(tf.where(finite, unscaled, 0.0))
        num_batches = num_batches_seen(self._scaling.optimizer)
        is_last = finite & ((num_batches + 1) % self._every == 0)
        nothing = tf.where(finite, 0.0, float("nan"))

        def none_yet(variable: tf.Variable) -> tf.Tensor:
            return tf.fill(variable.shape, tf.cast(nothing, variable.dtype))

        return tf.cond(
            is_last,
            lambda: self._exchanged(waiting),
            lambda: tf.nest.map_structure(none_yet, waiting),
        )

    def _exchanged(self, waiting: list[dict[int, tf.Variable]]) -> list[Gradients]:
        """Sums over the replicas what has been waiting, and starts again from zero."""
        strategy = self._strategy

        def scaled(variable: tf.Variable) -> tf.Tensor:
            value = variable.read_value()
            return self._scaling.scale(value) if self._scaling.active else value

        values = tf.nest.map_structure(scaled, waiting)
        results = strategy.run(lambda i: all_reduced(strategy, values[i]))
        totals = strategy.local_results(results)
        with tf.control_dependencies(tf.nest.flatten(values)):
            tf.nest.map_structure(lambda v: v.assign(tf.zeros_like(v)), waiting)
        return totals


def _zeros(variable: keras.Variable, device: str) -> tf.Variable:
    with tf.device(device):
        return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
