"""Learning-rate schedules match their formulas, before and after a reload."""

from __future__ import annotations

import math
from typing import Any

import keras
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist import schedules
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.run import flags, recipe


def rates(rule: Any, steps: int) -> list[float]:
    return [float(rule(step)) for step in range(steps)]


def test_constant_is_a_float() -> None:
    assert schedules.constant(0.1) == 0.1


def test_constant_after_warmup() -> None:
    rule = schedules.constant(0.1, warmup_steps=4)
    assert rates(rule, 7) == pytest.approx([0, 0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


@given(rate=st.floats(1e-4, 10), decay=st.integers(1, 50), warmup=st.integers(0, 20))
def test_cosine_matches_its_formula(rate: float, decay: int, warmup: int) -> None:
    rule = schedules.cosine(rate, decay + warmup, warmup)
    for step in (0, warmup // 2, warmup, warmup + decay // 2, warmup + decay):
        if step < warmup:
            expected = rate * step / warmup
        else:
            expected = rate * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2
        assert float(rule(step)) == pytest.approx(expected, rel=1e-4, abs=1e-6 * rate)


def test_warmup_over_all_epochs_raises() -> None:
    config = TrainConfig(lr_rule="cosine", epochs=3, warmup_epochs=3)
    with pytest.raises(ConfigurationError, match="Decrease --warmup-epochs or increase --epochs"):
        schedules.learning_rate(config, steps_per_epoch=10)


def test_learning_rate_scaling_is_opt_in() -> None:
    usual = {"batch_size": 1024, "learning_rate": 0.1}
    assert schedules.learning_rate(TrainConfig(**usual), 10) == 0.1
    for scaling, expected in (("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)):
        scaled = TrainConfig(**usual, lr_scaling=scaling, lr_reference_batch=256)
        assert schedules.learning_rate(scaled, 10) == pytest.approx(expected)
    with pytest.raises(ConfigurationError, match="add --lr-reference-batch, for example 256"):
        schedules.learning_rate(TrainConfig(**usual, lr_scaling="sqrt"), 10)


GOYAL = TrainConfig(
    learning_rate=0.1, lr_scaling="linear", lr_reference_batch=256, batch_size=8192, epochs=90,
    lr_rule="step", lr_decay_epochs="30,60,80", warmup_epochs=5, warmup_start=0.1,
)  # fmt: skip


@pytest.mark.parametrize("is_reloaded", [False, True])
def test_one_hour_schedule(is_reloaded: bool) -> None:
    """Goyal et al. 2017, sections 2.2 and 5.1: 0.1 to 3.2 in 5 epochs, a tenth at 30, 60 and 80."""
    steps = 157
    rule: Any = schedules.learning_rate(GOYAL, steps)
    if is_reloaded:
        config = keras.optimizers.schedules.serialize(rule)
        rule = keras.optimizers.schedules.deserialize(config)
    by_epoch = {
        0: 0.1, 1: 0.72, 2.5: 1.65, 4: 2.58, 5: 3.2, 29: 3.2, 30: 0.32, 59: 0.32, 60: 0.032,
        79: 0.032, 80: 0.0032, 89: 0.0032,
    }  # fmt: skip
    results = {epoch: float(rule(tf.cast(epoch * steps, tf.int64))) for epoch in by_epoch}
    assert results == pytest.approx(by_epoch, rel=2e-3)
    # The last step before a decay has the old rate, the first step of the epoch the new one.
    changes = [float(rule(epoch * steps - 1)) / results[epoch] for epoch in (30, 60, 80)]
    assert changes == pytest.approx([10, 10, 10], rel=1e-5)
    assert rates(rule, 2)[1] - results[0] == pytest.approx(3.1 / (5 * steps), rel=1e-3)


def test_step_without_warmup_is_a_keras_schedule() -> None:
    rule = schedules.step(1.0, [2, 3], factor=0.5)
    assert type(rule) is keras.optimizers.schedules.PiecewiseConstantDecay
    assert rates(rule, 5) == pytest.approx([1, 1, 0.5, 0.25, 0.25])


def test_step_needs_rising_boundaries_after_the_warmup() -> None:
    for boundaries in ([3, 2], [4, 8]):
        with pytest.raises(ConfigurationError, match="--lr-decay-epochs or --warmup-epochs"):
            schedules.step(1.0, boundaries, warmup_steps=5)
    with pytest.raises(ConfigurationError, match="add --lr-decay-epochs, for example 30,60,80"):
        schedules.learning_rate(TrainConfig(lr_rule="step"), 10)


def test_polynomial_matches_its_formula() -> None:
    rule = schedules.polynomial(2.0, total_steps=12, power=2.0, warmup_steps=2, start=1.0)
    expected = [1.0, 1.5] + [2 * (1 - i / 10) ** 2 for i in range(10)]
    assert rates(rule, 12) == pytest.approx(expected)
    straight = schedules.polynomial(1.0, total_steps=4, power=1.0)
    assert rates(straight, 5) == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_one_cycle_rises_falls_and_ends_near_zero() -> None:
    rule = schedules.one_cycle(1.0, total_steps=100)
    result = rates(rule, 101)
    assert result[0] == pytest.approx(0.04)
    assert result[15] == pytest.approx(0.52)
    assert result[30] == max(result) == pytest.approx(1.0)
    assert result[65] == pytest.approx(0.5, rel=1e-4)
    assert result[100] == pytest.approx(4e-6, rel=1e-2)


def test_configuration_selects_the_schedule() -> None:
    config = TrainConfig(lr_rule="cosine", epochs=4, warmup_epochs=0.5, learning_rate=1.0)
    rule = schedules.learning_rate(config, steps_per_epoch=10)
    assert isinstance(rule, keras.optimizers.schedules.LearningRateSchedule)
    assert float(rule(5)) == pytest.approx(1.0)
    assert float(rule(40)) == pytest.approx(0.0)


def test_schedule_over_epochs_of_unknown_length_raises() -> None:
    assert schedules.learning_rate(TrainConfig(learning_rate=0.1), None) == 0.1
    for config in (TrainConfig(lr_rule="cosine"), TrainConfig(warmup_epochs=1)):
        with pytest.raises(ConfigurationError, match="assert_cardinality"):
            schedules.learning_rate(config, None)


def test_description_lists_rate_decay_and_warmup() -> None:
    assert schedules.describe(GOYAL) == (
        "step, 3.2 (0.1 per 256 examples, linear), multiplied by 0.1 after epochs 30, 60, 80, "
        "linear warmup over 5 epochs from 0.1"
    )


@pytest.mark.parametrize(
    ("words", "warmup", "decays"),
    [
        ("--recipe=imagenet_resnet50", 5, [30, 60, 80]),
        ("--recipe=imagenet_resnet50 --epochs=100", 5, [30, 60, 80]),
        ("--recipe=imagenet_resnet50 --epochs=9", 0.5, [3, 6, 8]),
        ("--recipe=imagenet_resnet50 --epochs=2", 0.1111, [0.6667, 1.3333, 1.7778]),
        ("--recipe=imagenet_resnet50 --epochs=9 --warmup-epochs=3", 3, [3, 6, 8]),
        ("--recipe=vit_small --epochs=2", 0.1778, None),
        ("--recipe=gpt_text --epochs=4", 1, None),
        ("--recipe=gpt_text --epochs=2", 0.2, None),
        ("--recipe=digits --epochs=2", 0.5, None),
    ],
)
def test_schedules_of_recipes_fit_short_runs(
    words: str, warmup: float, decays: list[float] | None
) -> None:
    config = flags.parse("", "", words.split())
    assert (config.warmup_epochs, config.lr_decay_epochs) == (warmup, decays)


@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(1, 1), (2, 1), (2, 2), (2, 40)])
@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_has_a_schedule_for_few_epochs(
    name: str, epochs: int, steps_per_epoch: int
) -> None:
    config = flags.parse("", "", [f"--recipe={name}", f"--epochs={epochs}"])
    rate: Any = schedules.learning_rate(config, steps_per_epoch)
    if callable(rate):
        highest = max(rates(rate, epochs * steps_per_epoch))
        assert 0 < highest <= schedules.peak(config) * 1.001
        assert steps_per_epoch < 40 or highest > 0.95 * schedules.peak(config)
