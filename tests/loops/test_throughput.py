"""Throughput and the share of time spent waiting for data."""

from __future__ import annotations

from typing import Any

import pytest

from tfdist.loops.epoch import Call, Throughput
from tfdist.strategies.inner_loop import LoopResult


def call(num_rows: int, waited: float, seconds: float) -> Call:
    return Call(0, LoopResult(1, num_rows, waited), seconds, {})


def test_throughput_and_data_wait_share() -> None:
    data: Any = None
    throughput = Throughput()
    throughput.begin_epoch(data)
    throughput.end_call(call(10, 5.0, 60.0))  # compiles
    assert throughput.examples_per_second == 0.0
    throughput.end_call(call(20, 0.5, 1.0))
    throughput.end_call(call(20, 0.0, 1.0))
    assert throughput.examples_per_second == pytest.approx(20.0)
    assert throughput.seconds_per_step == pytest.approx(1.0)  # 20 rows each
    assert throughput.data_wait_share == pytest.approx(0.25)
    throughput.begin_epoch(data)
    throughput.end_call(call(5, 3.0, 1.0))
    assert throughput.examples_per_second == pytest.approx(5.0)
    assert throughput.data_wait_share == 1.0
