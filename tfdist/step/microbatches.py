"""Accumulation: a step over several rounds, whose sums cross the replicas once.

A share is cut into microbatches that are computed one after the other, so that only one of them
needs memory. A loss that divides by something other than rows (a mask, weights) needs that total
before the first gradient: then a forward pass over all rounds goes ahead, and only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.step.forward_backward import Contribution
from tfdist.step.replica import Totals
from tfdist.strategies.base import Strategy
from tfdist.strategies.collectives.local_sum import local_sum
from tfdist.strategies.shares import Share, share

#: (replica, round, what it computes in that, totals) -> what that contributes
Compute = Callable[[int, Any, Share, Totals], Contribution]


def over_rounds(
    strategy: Strategy, compute: Compute, shares: Sequence[Share], num_rounds: int
) -> list[Contribution]:
    """Adds up what each replica of this process contributes in all rounds.

    Returns:
        The sums by replica, not yet exchanged.
    """

    def of_round(number: Any, totals: list[Totals]) -> list[Contribution]:
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

    def computed(number: Any) -> tuple[list[Contribution], list[Contribution]]:
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
