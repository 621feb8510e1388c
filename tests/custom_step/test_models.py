"""Models with a custom `train_step` match one device."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras
import numpy as np
import pytest

from tests.custom_step import adversarial, contrastive, generative, guided  # noqa: F401 - register
from tests.custom_step.registry import MODELS, ModelSpec
from tests.support.training import STRATEGIES, assert_close, assert_same_weights
from tfdist.trainer import Trainer

#: Batches of 5, 5 and 2 rows.
FIT: dict[str, Any] = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0}


def fit_arguments(spec: ModelSpec, model: keras.Model) -> dict[str, Any]:
    tests = type(model).test_step is not keras.Model.test_step
    return FIT | {"x": spec.x} | ({"validation_data": (spec.x,)} if tests else {})


@functools.cache
def on_one_device(name: str) -> tuple[keras.Model, dict[str, list[float]]]:
    spec = MODELS[name]
    model = spec.build(False)
    return model, model.fit(**fit_arguments(spec, model)).history


def trained(name: str, strategy: str, devices: int, draws: bool = False, **options: Any) -> Trainer:
    spec = MODELS[name]
    trainer = Trainer(functools.partial(spec.build, draws), strategy, devices=devices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(**fit_arguments(spec, trainer.model) | options)
    warned = [str(w.message) for w in caught if "computes the full batch" in str(w.message)]
    assert len(warned) == (spec.full_batch is not None and devices > 1)
    assert all(str(spec.full_batch) in message for message in warned)
    return trainer


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        pytest.param(*s, marks=[] if s == ("mirrored", 2) else pytest.mark.long)
        for s in [*STRATEGIES, ("mirrored", 3)]
    ],
)
def test_matches_one_device(name: str, strategy: str, devices: int) -> None:
    plain, history = on_one_device(name)
    trainer = trained(name, strategy, devices)
    assert_same_weights(trainer.model, plain)
    result = trainer.model.history.history
    assert_close({name: result[name] for name in history}, history)
    assert len(result) == len(history)


def test_random_noise_model_learns() -> None:
    trainer = trained("Diffusion", "mirrored", 2, draws=True, epochs=60)
    history = trainer.model.history.history["loss"]
    assert np.mean(history[-30:]) < 0.9 * np.mean(history[:30])
