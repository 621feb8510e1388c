"""The measurement of all-reduce."""

from __future__ import annotations

from tfdist import strategies
from tfdist.groups import traffic


def test_sum_of_ones_is_the_number_of_replicas() -> None:
    seconds, total = traffic.measure_all_reduce(strategies.create("mirrored", devices=3), 4000)
    assert total == 3
    assert seconds > 0
