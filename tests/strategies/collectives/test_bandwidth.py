from __future__ import annotations

from tfdist import strategies
from tfdist.strategies.collectives import bandwidth


def test_ones_add_up_to_the_number_of_replicas() -> None:
    seconds, total = bandwidth.measure(strategies.create("mirrored", devices=3), 4000)
    assert total == 3
    assert seconds > 0
