"""Decisions that workers agree on after each call, observers and throughput, without graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.training import X, Y, build
from tfdist.errors import DataError, Preempted
from tfdist.groups.base import LocalGroup
from tfdist.loops import epoch, interrupts
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.epoch import Call, Epoch, Observer
from tfdist.loops.functions import Steps
from tfdist.loops.observers import Throughput
from tfdist.loops.steps_per_call import StepsPerCall
from tfdist.strategies.inner_loop import LoopResult
from tfdist.strategies.one_device import OneDevice


class WithAnother(LocalGroup):
    """The group of this process and a simulated second worker."""

    def __init__(self, rank: int = 0, **other: float) -> None:
        super().__init__()
        self.rank = rank
        self._other = [other.get(name) for name in ("num_steps", "stopped", "checksum", "pending")]

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        pairs = zip(self._other, numbers, strict=True)
        others = [mine if other is None else other for other, mine in pairs]
        rows = [numbers, others] if self.rank == 0 else [others, numbers]
        return np.asarray(rows, np.float64)


def another(**options: Any) -> OneDevice:
    """Returns a strategy of one device whose group is `WithAnother`."""
    strategy = OneDevice()
    strategy.group = WithAnother(**options)
    return strategy


class Listener(Observer):
    """Records the events that it observes in a shared list."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def begin_epoch(self, epoch: Epoch) -> None:
        self.events.append(f"{self.name} {epoch.data.num_batches} batches")

    def begin_call(self, step: int) -> None:
        self.events.append(f"{self.name} from {step}")

    def end_call(self, call: Call) -> None:
        self.events.append(f"{self.name} to {call.last_step}")


class Stop(Observer):
    def wants_to_stop(self) -> bool:
        return True


def run(
    strategy: OneDevice, *observers: Observer, steps_per_call: int = 1, **options: int
) -> list[int]:
    """Runs an epoch of three batches, and returns the number of steps of each call."""
    step_counts: list[int] = []

    def steps(_: Iterator[Any], num_steps: int) -> tuple[LoopResult, dict[str, Any]]:
        step_counts.append(num_steps)
        return LoopResult(num_steps, 5 * num_steps, 0.0), {"loss": 1.0}

    this = Epoch("epoch 1", DataHandler(OneDevice(), X, y=Y, batch_size=5, **options))
    per_call = StepsPerCall(steps_per_call, build())
    assert epoch.run(Steps(steps, False), this, per_call, strategy, observers) == {"loss": 1.0}
    return step_counts


def test_observers_are_called_in_order() -> None:
    events: list[str] = []
    first, second = Listener("first", events), Listener("second", events)
    assert run(OneDevice(), first, second, steps_per_call=2) == [2, 1]
    expected = ["3 batches", "from 0", "to 1", "from 2", "to 2"]
    assert events == [f"{name} {what}" for what in expected for name in ("first", "second")]


def test_observer_stops_the_epoch() -> None:
    assert run(OneDevice(), Observer(), Stop(), Observer()) == [1]


def test_another_worker_stops_the_epoch() -> None:
    assert run(another(stopped=True)) == [1]


def test_rank_0_chooses_the_number_of_steps() -> None:
    assert run(another(rank=1, num_steps=2)) == [1, 2]
    assert run(another(rank=0, num_steps=2)) == [1, 1, 1]


def test_interrupt_of_another_worker_raises() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(another(pending=2))
    with pytest.raises(Preempted):
        run(another(pending=3))


def test_time_limit_of_another_worker_raises() -> None:
    with pytest.raises(interrupts.TimeIsUp):
        run(another(pending=1))


def test_time_limit_raises_after_a_call() -> None:
    listener = Listener("who", events := [])
    with pytest.raises(interrupts.TimeIsUp), interrupts.deadline(0.0):
        run(OneDevice(), listener)
    assert events == ["who 3 batches", "who from 0", "who to 0"]
    with interrupts.deadline(None):
        assert run(OneDevice()) == [1, 1, 1]


def test_different_batches_on_workers_raise() -> None:
    with pytest.raises(DataError, match=r"Up to step 1, rank 1 got different batches from rank 0"):
        run(another(checksum=7))


def timed_call(num_rows: int, waited: float, seconds: float) -> Call:
    return Call(0, LoopResult(1, num_rows, waited), seconds, {})


def test_throughput_and_data_wait_share() -> None:
    data: Any = None
    throughput = Throughput()
    throughput.begin_epoch(Epoch("epoch 1", data))
    throughput.end_call(timed_call(10, 5.0, 60.0))  # compiles
    assert throughput.examples_per_second == 0.0
    throughput.end_call(timed_call(20, 0.5, 1.0))
    throughput.end_call(timed_call(20, 0.0, 1.0))
    assert throughput.examples_per_second == pytest.approx(20.0)
    assert throughput.seconds_per_step == pytest.approx(1.0)  # 20 rows each
    assert throughput.data_wait_share == pytest.approx(0.25)
    throughput.begin_epoch(Epoch("epoch 1", data))
    throughput.end_call(timed_call(5, 3.0, 1.0))
    assert throughput.examples_per_second == pytest.approx(5.0)
    assert throughput.data_wait_share == 1.0
