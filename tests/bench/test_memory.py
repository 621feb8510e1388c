"""The memory benchmark counts what is expected, at sizes where it is known by heart."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.training import BOUND
from tfdist.bench.memory import limit, measure


def test_expected_is_zeros_arithmetic() -> None:
    per_weight = {name: measure.expected(name, 1, 4) for name in measure.CONTENDERS}
    rest = [own["expected_rest"] for own in per_weight.values()]
    assert rest == [48, 48, 12, 12, 28, 28, 12, 28, 48, 28, 28, 12]
    sent = [own["expected_sent"] for own in per_weight.values()]
    assert sent == [0, 0, 0, 0, 0, 0, 0, 0, 6, 9, 6, 9]
    alone = measure.expected("one_device", 1, 1)
    assert (alone["expected_rest"], alone["expected_step"]) == (12, 16)


@pytest.mark.long
@pytest.mark.parametrize("contender", ["sharded parameters", "sharded parameters, processes"])
def test_parts_are_counted_where_they_are(contender: str) -> None:
    if measure.CONTENDERS[contender].in_processes:
        pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed: make horovod")
    told = measure.held(contender, 131_072, 2, 2)
    scalars = 8 + 4  # the count of steps and the learning rate
    assert told["largest"] == told["expected_rest"] // 2 + scalars
    assert told["rest"] >= told["expected_rest"]
    # The way back needs not the first layer's weights, and still has the last's: there are no more.
    wanted = told["expected_sent"] * 2 / 3
    assert wanted <= told["sent"] <= wanted + 100


@pytest.mark.long
@pytest.mark.processes
def test_what_does_not_fit_a_device_trains_cut() -> None:
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed: make horovod")
    # 2.6 million weights: 30 MB of them and of Adam's moments, and 10 more of gradients.
    free, whole, cut = limit.compared(2_600_000, 10, 2, 30)
    assert not free["error"]
    assert whole["error"].startswith("out of memory: ")
    assert "--strategy sharded" in whole["error"]
    assert not cut["error"]
    assert cut["difference"] < BOUND
    np.testing.assert_allclose(cut["loss"], free["loss"], rtol=BOUND)
