"""A field that the recipe does not read has no effect, and setting it prints a warning."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tfdist import schedules
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError
from tfdist.run.effect import OF_RECIPES, Watched, check_spread

RECIPE: Any = SimpleNamespace(DEFAULTS={"learning_rate": 0.5})


def test_fields_that_are_read_have_an_effect() -> None:
    scaled = {"lr_scaling": "linear", "lr_reference_batch": 32}
    watched = Watched(TrainConfig(learning_rate=0.1, lr_rule="cosine", **scaled))
    schedules.learning_rate(watched.as_config(), 20)
    assert watched.unread(RECIPE) == ["jit_compile", "run_eagerly"]


def test_set_field_that_is_not_read_raises() -> None:
    watched = Watched(TrainConfig(learning_rate=0.1))
    with pytest.raises(ConfigurationError, match=r"learning_rate=0\.1 has no effect: .* 'digits'"):
        watched.unread(RECIPE)


def test_default_of_the_recipe_may_stay_unread() -> None:
    assert Watched(TrainConfig(learning_rate=0.5)).unread(RECIPE) == list(OF_RECIPES)


def test_dumping_the_configuration_reads_every_field() -> None:
    watched = Watched(TrainConfig(learning_rate=0.1))
    watched.as_config().model_dump()
    assert watched.unread(RECIPE) == []


@pytest.mark.parametrize(
    ("fields", "cure"),
    [
        ({"lr_reference_batch": 32}, "set lr_scaling: linear or sqrt"),
        ({"lr_power": 1.0, "lr_rule": "cosine"}, "set lr_rule: polynomial"),
        ({"lr_decay_epochs": [1]}, "set lr_rule: step"),
        ({"warmup_start": 0.1}, "set warmup_epochs"),
    ],
)
def test_field_without_the_field_that_it_needs_raises(fields: dict[str, Any], cure: str) -> None:
    watched = Watched(TrainConfig(learning_rate=0.5, **fields))
    schedules.learning_rate(watched.as_config(), 20)
    with pytest.raises(ConfigurationError, match=cure):
        watched.unread(RECIPE)


@pytest.mark.parametrize(
    ("flags", "num_replicas", "num_workers", "message"),
    [
        ({"sync_batch_norm": True}, 1, 1, "sync_batch_norm=True has no effect with one repl"),
        ({"watchdog_seconds": 60}, 2, 1, "watchdog_seconds=60.0 has no effect because no"),
        ({"sync_batch_norm": True, "watchdog_seconds": 60}, 2, 2, ""),
        ({"epochs": 3}, 1, 1, ""),
    ],
)
def test_distributed_options_need_several_replicas(
    flags: dict[str, Any], num_replicas: int, num_workers: int, message: str
) -> None:
    strategy: Any = SimpleNamespace(
        num_replicas=num_replicas, group=SimpleNamespace(size=num_workers)
    )
    expectation = pytest.raises(ConfigurationError, match=message) if message else nullcontext()
    with expectation:
        check_spread(TrainConfig(**flags), RECIPE, strategy)
