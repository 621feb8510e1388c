"""The memory benchmark counts what is expected, at sizes where it is known by heart."""

from __future__ import annotations

import pytest

from tfdist.bench.memory import measure


def test_expected_is_zeros_arithmetic() -> None:
    per_weight = {name: measure.expected(name, 1, 4) for name in measure.CONTENDERS}
    rest = [own["expected_rest"] for own in per_weight.values()]
    assert rest == [48, 48, 12, 28, 28, 12, 48, 28, 28, 12]
    sent = [own["expected_sent"] for own in per_weight.values()]
    assert sent == [0, 0, 0, 0, 0, 0, 6, 9, 6, 6]
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
    assert told["expected_sent"] <= told["sent"] <= told["expected_sent"] + 100
