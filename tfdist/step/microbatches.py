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

    def noted(number: Any) -> list[list[tf.Tensor]]:
        totals = [Totals() for _ in shares]
        of_round(number, totals)
        return [t.noted for t in totals]

    def add_up(first: Any, later: Callable[[Any], Any]) -> Any:
        def add(number: tf.Tensor, sums: Any) -> tuple[tf.Tensor, Any]:
            both = sums, later(number)
            return number + 1, tf.nest.map_structure(lambda *terms: local_sum(terms), *both)

        sizes = tf.TensorShape([]), tf.nest.map_structure(_shape, first)
        begin = tf.constant(1), first
        return tf.while_loop(lambda number, _: number < num_rounds, add, begin, sizes)[1]

    known: list[Any] = [None for _ in shares]
    if (ahead := noted(0))[0]:
        local = add_up(ahead, noted)
        known = strategy.local_results(strategy.run(lambda i: strategy.all_reduce(local[i])))

    def computed(number: Any) -> list[Contribution]:
        return of_round(number, [Totals(known=k) for k in known])

    first = computed(0)
    sums = add_up(
        [each.summable() for each in first],
        lambda number: [each.summable() for each in computed(number)],
    )
    return [total.with_same(each) for total, each in zip(sums, first, strict=True)]


def _microbatch(own: Share, number: Any, num_rounds: int) -> Share:
    """Returns what a replica computes of its share in one round."""
    rows = own.num_rows
    return share(own.rows, rows * number // num_rounds, rows * (number + 1) // num_rounds)


def _shape(total: Any) -> Any:
    """The shape of a sum in all rounds: slices become more."""
    if not isinstance(total, tf.IndexedSlices):
        return total.shape
    shape = tf.TensorShape([None, *total.values.shape[1:]])
    return tf.IndexedSlicesSpec(shape, total.dtype, total.indices.dtype, tf.int32, [None])
