"""The memory study counts the expected bytes, at sizes where they can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import memory, memory_limit
from tests.support.packages import needs_horovod
from tests.support.training import TOLERANCE


def test_expected_bytes_are_those_of_zero() -> None:
    per_weight = {name: memory.expected(name, 1, 4) for name in memory.CONTENDERS}
    rest = [own["expected_rest"] for own in per_weight.values()]
    assert rest == [48, 48, 12, 12, 28, 28, 12, 28, 48, 28, 28, 12]
    sent = [own["expected_sent"] for own in per_weight.values()]
    assert sent == [0, 0, 0, 0, 0, 0, 0, 0, 6, 9, 6, 9]
    alone = memory.expected("one_device", 1, 1)
    assert (alone["expected_rest"], alone["expected_step"]) == (12, 16)


@pytest.mark.long
@pytest.mark.parametrize(
    "contender",
    ["sharded parameters", pytest.param("sharded parameters, processes", marks=needs_horovod)],
)
def test_shards_are_counted_on_their_devices(contender: str) -> None:
    measured = memory.measure(contender, 131_072, 2, 2)
    scalars = 8 + 4  # the count of steps and the learning rate
    assert measured["largest"] == measured["expected_rest"] // 2 + scalars
    assert measured["rest"] >= measured["expected_rest"]
    # The backward pass needs no weights of the first layer, and still has those of the last.
    wanted = measured["expected_sent"] * 2 / 3
    assert wanted <= measured["sent"] <= wanted + 100


@pytest.mark.long
@pytest.mark.processes
@needs_horovod
def test_network_that_does_not_fit_trains_sharded() -> None:
    # 2.6 million weights: 30 MB of them and of Adam's moments, and 10 more of gradients.
    free, whole, sharded = memory_limit.compare(2_600_000, 10, 2, 30)
    assert not free["error"]
    assert whole["error"].startswith("out of memory: ")
    assert "--strategy sharded" in whole["error"]
    assert not sharded["error"]
    assert sharded["difference"] < TOLERANCE
    np.testing.assert_allclose(sharded["loss"], free["loss"], rtol=TOLERANCE)
