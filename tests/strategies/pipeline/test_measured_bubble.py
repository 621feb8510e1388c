"""The measured pipeline bubble: the share of time for which stages wait."""

from __future__ import annotations

import itertools
import re
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import tensorflow as tf

from tests.support.training import FIT, build
from tfdist.strategies import clock
from tfdist.strategies.pipeline import bubble, schedule
from tfdist.strategies.pipeline.bubble import MeasuredBubble
from tfdist.strategies.pipeline.order import Order
from tfdist.strategies.pipeline.schedule import Pass
from tfdist.strategies.pipeline.strategy import Pipeline
from tfdist.trainer import Trainer


def traced_order(turns: dict[Pass, list[tf.Tensor]]) -> Any:
    """Returns a traced step with the results of these passes."""
    traced = create_autospec(Order, instance=True)
    traced.turns.return_value = turns
    return traced


@pytest.mark.parametrize(
    ("order", "shares"),
    [
        *itertools.product(["gpipe", "1f1b", "zb"], [[0.5, 0.5], [0.25] * 4, [0.2, 0.5, 0.3]]),
        ("interleaved", [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_measured_bubble_of_a_planned_schedule_is_the_planned_one(
    order: str, shares: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    micro_batches = 8
    num_devices = 2 if order == "interleaved" else len(shares)
    planned = schedule.turns(shares, micro_batches, order, num_devices)
    monkeypatch.setattr(bubble, "_time_of", lambda tensors: tensors[-1])
    traced = traced_order(
        {
            Pass(turn.stage, turn.micro_batch, turn.kind): [tf.constant(turn.end, tf.float64)]
            for turn in planned
        }
    )
    measured = MeasuredBubble(len(shares), micro_batches, num_devices)
    measured.prepare()
    for _ in range(2):  # steps
        measured.note([tf.constant(0.0, tf.float64)], traced)
    best = 1 / max(turn.end for turn in planned)
    assert measured.share() == pytest.approx(1 - best / num_devices)
    if order == "gpipe" and len(set(shares)) == 1:
        assert measured.share() == pytest.approx(1 - bubble.used(len(shares), micro_batches))


def test_bubble_is_unknown_if_the_start_of_a_step_is() -> None:
    traced = traced_order({Pass(0, 0, "backward"): [tf.constant(1.0)]})
    measured = MeasuredBubble(1, 1)
    measured.prepare()
    measured.note([], traced)
    assert measured.share() is None


def test_begin_that_is_read_late_makes_no_negative_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubble, "_time_of", lambda tensors: tensors[-1])
    passes = {Pass(0, 0, "forward"): 1.0, Pass(0, 0, "backward"): 3.0}
    traced = traced_order({own: [tf.constant(end, tf.float64)] for own, end in passes.items()})
    measured = MeasuredBubble(1, 1)
    measured.prepare()
    measured.note([tf.constant(2.0, tf.float64)], traced)
    assert measured.share() == 0


def test_summary_reports_the_bubble_of_training_only() -> None:
    strategy = Pipeline(2, micro_batches=2)
    trainer = Trainer(build, strategy)
    assert strategy.summary() == {}
    trainer.fit(**FIT)
    summary = strategy.summary()
    assert re.fullmatch(r"\d+% of the devices' time, as measured", summary["bubble"])
    trainer.evaluate(FIT["x"], FIT["y"], verbose=0)
    assert strategy.summary() == summary


def test_deterministic_ops_use_the_host_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (clock, bubble):
        monkeypatch.setattr(module, "computes_in_one_order", lambda: True)
    monkeypatch.delattr(tf, "timestamp")  # not allowed with deterministic ops
    read = create_autospec(time.monotonic, side_effect=itertools.count(1.0))
    # Not in the module `time` itself, which other threads use as well.
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=read))
    traced = traced_order({Pass(0, 0, "backward"): [tf.constant(1.0)]})
    measured = MeasuredBubble(1, 1)
    measured.prepare()
    tf.function(lambda: measured.note([tf.constant(0.0)], traced))()
    assert read.call_count == 2  # at the beginning and at the end
