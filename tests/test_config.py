"""Fields of the configuration: accepted forms, invalid values, and YAML."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tfdist.config import TrainConfig


def test_devices_are_a_number_or_names() -> None:
    assert TrainConfig(devices="2").devices == 2
    assert TrainConfig(devices="GPU:0, GPU:1").devices == ["GPU:0", "GPU:1"]
    assert TrainConfig(devices=["CPU:0"]).devices == ["CPU:0"]
    assert TrainConfig().devices is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("epochs", "3.5"),
        ("batch_size", -1),
        ("devices", 0),
        ("steps_per_call", "often"),
        ("precision", "float8"),
        ("loss_scale", -8),
        ("loss_scale_growth_factor", 1),
        ("loss_scale_backoff_factor", 1),
        ("learning_rate", "inf"),
        ("learning_rate", "nan"),
        ("verbose", 3),
        ("smoke", "perhaps"),
        ("learning_rates", 0.1),
        ("max_time", "2 hours"),
        ("max_time", ""),
        ("max_time", "0s"),
        ("checkpoint_every", "0s"),
        ("checkpoint_every", "10s5m"),
        ("checkpoint_every", "0h0m"),
        ("checkpoint_every", "-10m"),
        ("checkpoint_every", 0),
        ("logger", "tensorboard,printer"),
        ("data_dir", "s3://bucket/cache"),
        ("cache_dir", "s3://bucket/cache"),
    ],
)
def test_invalid_value_raises(field: str, value: object) -> None:
    with pytest.raises(ValidationError):
        TrainConfig(**{field: value})


def test_folders_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    config = TrainConfig(run_dir="~/runs/a", data="~/photos", data_dir="s3~/b")
    assert (config.run_dir, config.data, config.data_dir) == (
        "/home/a/runs/a", "/home/a/photos", "s3~/b",
    )  # fmt: skip


def test_field_accepts_words_and_numbers() -> None:
    assert TrainConfig(loss_scale="dynamic").loss_scale == "dynamic"
    assert TrainConfig(loss_scale="128").loss_scale == 128.0
    assert TrainConfig(steps_per_call="4").steps_per_call == 4


@pytest.mark.parametrize(
    ("time", "seconds"), [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("1d", 86400), ("7.5", 7.5)]
)
def test_parses_durations(time: str, seconds: float) -> None:
    config = TrainConfig(max_time=time)
    assert config.max_time == seconds
    assert TrainConfig(**yaml.safe_load(config.to_yaml())) == config


def test_conflicting_step_limits_raise() -> None:
    assert TrainConfig(overfit_batches=2).limit_steps is None
    for others in ({"smoke": True}, {"limit_steps": 3}):
        with pytest.raises(ValidationError, match="already limits the steps"):
            TrainConfig(overfit_batches=2, **others)
    with pytest.raises(ValidationError, match="--smoke already limits the steps"):
        TrainConfig(limit_steps=2, smoke=True)


def test_parses_comma_separated_names() -> None:
    assert TrainConfig(export="onnx, tflite").export == ["onnx", "tflite"]
    assert (TrainConfig().logger, TrainConfig(logger="csv").logger) == (["tensorboard"], ["csv"])


def test_config_is_immutable() -> None:
    with pytest.raises(ValidationError):
        TrainConfig().epochs = 3  # type: ignore[misc]


@given(
    epochs=st.integers(1, 10**6),
    learning_rate=st.floats(1e-300, 1e300),
    loss_scale=st.one_of(st.sampled_from(["auto", "none", "dynamic"]), st.floats(1e-3, 1e6)),
    devices=st.one_of(st.none(), st.integers(1, 64), st.just(["GPU:1", "CPU:0"])),
    run_dir=st.one_of(st.none(), st.text(st.characters(codec="utf-8", categories=["L", "N"]))),
)
def test_yaml_round_trip(**fields: object) -> None:
    config = TrainConfig(**fields)
    assert TrainConfig(**yaml.safe_load(config.to_yaml())) == config
