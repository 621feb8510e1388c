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
from tfdist.strategies.shares import Batch, num_rows, take

#: (replica, round, rows of the round, totals) -> what they contribute
Compute = Callable[[int, Any, Batch, Totals], Contribution]


def over_rounds(
    strategy: Strategy, compute: Compute, shares: Sequence[Batch], num_rounds: int
) -> list[Contribution]:
    """Adds up what each replica of this process contributes in all rounds.

    Returns:
        The sums by replica, with dense gradients, not yet exchanged.
    """

    def of_round(number: Any, totals: list[Totals]) -> list[Contribution]:
        rows = [_microbatch(share, number, num_rounds) for share in shares]
        results = strategy.run(lambda i: compute(i, number, rows[i], totals[i]))
        return [_dense(result) for result in strategy.local_results(results)]

    def noted(number: Any) -> list[list[tf.Tensor]]:
        totals = [Totals() for _ in shares]
        of_round(number, totals)
        return [t.noted for t in totals]

    def add_up(first: Any, later: Callable[[Any], Any]) -> Any:
        def add(number: tf.Tensor, sums: Any) -> tuple[tf.Tensor, Any]:
            return number + 1, tf.nest.map_structure(tf.add, sums, later(number))

        return tf.while_loop(lambda number, _: number < num_rounds, add, (tf.constant(1), first))[1]

    known: list[Any] = [None for _ in shares]
    if (ahead := noted(0))[0]:
        local = add_up(ahead, noted)
        known = strategy.local_results(strategy.run(lambda i: strategy.all_reduce(local[i])))

    def computed(number: Any) -> list[Contribution]:
        return of_round(number, [Totals(known=k) for k in known])

    first = computed(0)
    sums = add_up(
        [share.summable() for share in first],
        lambda number: [share.summable() for share in computed(number)],
    )
    return [total.with_same(share) for total, share in zip(sums, first, strict=True)]


def _microbatch(share: Batch, number: Any, num_rounds: int) -> Batch:
    """Returns the rows of one round."""
    rows = num_rows(share)
    return take(share, rows * number // num_rounds, rows * (number + 1) // num_rounds)


def _dense(share: Contribution) -> Contribution:
    gradients = {i: tf.convert_to_tensor(g) for i, g in share.gradients.items()}
    return share._replace(gradients=gradients)
