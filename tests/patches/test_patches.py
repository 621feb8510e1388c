"""Patches that only change speed change no result: each is compared on and off."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest

import tfdist
from tfdist.patches import keras_patches
from tfdist.patches.keras_patches import PATCHES, Patch
from tfdist.replica.replica import StepOptions

_FAST = [patch for patch in PATCHES if not patch.is_exact]


def build_model() -> keras.Model:
    """Returns a classifier of images with every layer that a patch replaces."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.Activation("gelu"),
            layers.Dropout(0.2),
            layers.Flatten(),
            layers.LayerNormalization(),
            layers.Dense(5),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


def trained(monkeypatch: pytest.MonkeyPatch, *fast: Patch) -> list[np.ndarray]:
    """Returns the weights and the logs after two steps with the exact patches and these."""
    chosen = (
        dataclasses.replace(patch, applies=lambda *_: True) if patch in fast else patch
        for patch in PATCHES if patch.is_exact or patch in fast
    )  # fmt: skip
    monkeypatch.setattr(keras_patches, "PATCHES", tuple(chosen))
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(14, 6, 6, 3)).astype("float32"), np.arange(14) % 5
    trainer = tfdist.Trainer(build_model, strategy="mirrored", devices=2)
    logs = trainer.fit(x, y, batch_size=7, verbose=0).history
    return [*trainer.model.get_weights(), *map(np.asarray, logs.values())]


@pytest.fixture(scope="module")
def without() -> list[np.ndarray]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return trained(monkeypatch)


@pytest.mark.parametrize("patch", _FAST, ids=[patch.name for patch in _FAST])
def test_speed_changes_no_result(
    patch: Patch, without: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    for one, other in zip(trained(monkeypatch, patch), without, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_environment_turns_speed_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_FAST", "0")
    entered: list[str] = []
    noted = [
        dataclasses.replace(patch, applies=lambda *_, name=patch.name: entered.append(name))
        for patch in PATCHES
    ]
    monkeypatch.setattr(keras_patches, "PATCHES", noted)
    with keras_patches.keras_patched(build_model(), StepOptions()):
        assert entered == [patch.name for patch in PATCHES if patch.is_exact]
