"""The measured share of time for which stages wait."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any
from unittest.mock import create_autospec

import pytest
import tensorflow as tf

from tests.support.training import FIT, build
from tfdist.strategies import clock
from tfdist.strategies.pipeline import bubble, schedule
from tfdist.strategies.pipeline.bubble import MeasuredBubble
from tfdist.strategies.pipeline.schedule import Order
from tfdist.strategies.pipeline.strategy import Pipeline
from tfdist.trainer import Trainer


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("shares", [[0.5, 0.5], [0.25] * 4, [0.2, 0.5, 0.3]])
def test_of_turns_as_they_are_planned_it_is_what_the_plan_leaves(
    order: str, shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    micro_batches = 8
    planned = schedule.turns(shares, micro_batches, order)
    monkeypatch.setattr(bubble, "_time_of", lambda tensors: tensors[-1])
    traced: Any = create_autospec(Order, instance=True)
    traced.turns.return_value = {
        (own.stage, own.micro_batch, own.back): [tf.constant(own.end, tf.float64)]
        for own in planned
    }
    measured = MeasuredBubble(len(shares), micro_batches)
    measured.prepare()
    for _ in range(2):  # steps
        measured.note([tf.constant(0.0, tf.float64)], traced)
    best = 1 / max(turn.end for turn in planned)
    assert measured.share() == pytest.approx(1 - best / len(shares))
    if order == "gpipe" and len(set(shares)) == 1:
        assert measured.share() == pytest.approx(1 - bubble.used(len(shares), micro_batches))


def test_without_an_input_that_tells_when_a_step_begins_nothing_is_told() -> None:
    traced: Any = create_autospec(Order, instance=True)
    traced.turns.return_value = {(0, 0, True): [tf.constant(1.0)]}
    measured = MeasuredBubble(1, 1)
    measured.prepare()
    measured.note([], traced)
    assert measured.share() is None


def test_a_training_tells_it_and_an_evaluation_adds_nothing() -> None:
    strategy = Pipeline(2, micro_batches=2)
    trainer = Trainer(build, strategy)
    assert strategy.summary() == {}
    trainer.fit(**FIT)
    told = strategy.summary()
    assert re.fullmatch(r"\d+% of the devices' time, as measured", told["bubble"])
    trainer.evaluate(FIT["x"], FIT["y"], verbose=0)
    assert strategy.summary() == told


def test_where_operations_are_deterministic_the_clock_is_one_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (clock, bubble):
        monkeypatch.setattr(module, "computes_in_one_order", lambda: True)
    monkeypatch.delattr(tf, "timestamp")  # not allowed with deterministic ops
    read = create_autospec(time.monotonic, side_effect=itertools.count(1.0))
    monkeypatch.setattr(clock.time, "monotonic", read)
    traced: Any = create_autospec(Order, instance=True)
    traced.turns.return_value = {(0, 0, True): [tf.constant(1.0)]}
    measured = MeasuredBubble(1, 1)
    measured.prepare()
    tf.function(lambda: measured.note([tf.constant(0.0)], traced))()
    assert read.call_count == 2  # at the beginning and at the end
