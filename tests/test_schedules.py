from __future__ import annotations

import math
from typing import Any

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist import schedules
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError


def rates(rule: Any, steps: int) -> list[float]:
    return [float(rule(step)) for step in range(steps)]


def test_constant_is_a_float() -> None:
    assert schedules.constant(0.1) == 0.1


def test_constant_after_warmup() -> None:
    rule = schedules.constant(0.1, warmup_steps=4)
    assert rates(rule, 7) == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


@given(
    rate=st.floats(1e-4, 10),
    decay=st.integers(1, 50),
    warmup=st.integers(0, 20),
)
def test_cosine_is_its_formula(rate: float, decay: int, warmup: int) -> None:
    rule = schedules.cosine(rate, decay + warmup, warmup)
    for step in (0, warmup // 2, warmup, warmup + decay // 2, warmup + decay):
        if step < warmup:
            expected = rate * step / warmup
        else:
            expected = rate * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2
        assert float(rule(step)) == pytest.approx(expected, rel=1e-4, abs=1e-6 * rate)


def test_warmup_that_leaves_nothing() -> None:
    config = TrainConfig(lr_rule="cosine", epochs=3, warmup_epochs=3)
    with pytest.raises(ConfigurationError, match="lower --warmup-epochs or raise --epochs"):
        schedules.learning_rate(config, steps_per_epoch=10)


def test_linear_scaling_is_off_by_default() -> None:
    assert schedules.learning_rate(TrainConfig(batch_size=512, learning_rate=0.1), 10) == 0.1
    scaled = TrainConfig(batch_size=512, learning_rate=0.1, lr_reference_batch=256)
    assert schedules.learning_rate(scaled, 10) == pytest.approx(0.2)


def test_rule_of_a_configuration() -> None:
    config = TrainConfig(lr_rule="cosine", epochs=4, warmup_epochs=0.5, learning_rate=1.0)
    rule = schedules.learning_rate(config, steps_per_epoch=10)
    assert isinstance(rule, keras.optimizers.schedules.LearningRateSchedule)
    assert float(rule(5)) == pytest.approx(1.0)
    assert float(rule(40)) == pytest.approx(0.0)


def test_epochs_of_unknown_length() -> None:
    assert schedules.learning_rate(TrainConfig(learning_rate=0.1), None) == 0.1
    for config in (TrainConfig(lr_rule="cosine"), TrainConfig(warmup_epochs=1)):
        with pytest.raises(ConfigurationError, match="assert_cardinality"):
            schedules.learning_rate(config, None)


def test_description() -> None:
    config = TrainConfig(
        lr_rule="cosine", warmup_epochs=2, learning_rate=0.1, batch_size=512, lr_reference_batch=256
    )
    assert schedules.describe(config) == (
        "cosine, 0.2 (0.1 per 256 examples), linear warmup over 2 epochs"
    )
