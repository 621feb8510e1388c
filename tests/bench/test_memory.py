"""The memory benchmark counts what is expected, at sizes where it is known by heart."""

from __future__ import annotations

import pytest

from tfdist.bench.memory import measure


def test_expected_is_zeros_arithmetic() -> None:
    per_weight = {name: measure.expected(name, 1, 4) for name in measure.CONTENDERS}
    assert [own["expected_rest"] for own in per_weight.values()] == [48, 48, 28, 28, 12]
    assert measure.expected("one_device", 1, 1) == {"expected_rest": 12, "expected_step": 16}


@pytest.mark.long
def test_parts_are_counted_in_a_process() -> None:
    told = measure.held("sharded parameters", 131_072, 2, 2)
    scalars = 8 + 4  # the count of steps and the learning rate
    half = told["expected_rest"] // 2
    assert told["by_device"] == {"CPU:0": half + scalars, "CPU:1": half}
    assert told["rest"] >= told["expected_rest"]
