"""Pipeline parallelism combined with checkpoints, files, number formats and more stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tests.checkpoint.test_resume import without_random_layers
from tests.checkpoint.training import fit
from tests.support.case import compiled
from tests.support.training import X, Y, assert_same_weights, assert_trains_as_keras
from tfdist.strategies.pipeline.strategy import Pipeline

pytestmark = pytest.mark.long

FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 7, "shuffle": False, "verbose": 0}


def with_skips(policy: str | None = None) -> keras.Model:
    """Returns a model with two skip connections over several layers, and normalization."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    skips, hidden = [], inputs
    for width in (8, 6):
        hidden = layers.Dense(width, activation="tanh", dtype=policy)(hidden)
        skips.append(hidden)
    for skip in reversed(skips):
        hidden = layers.Dense(skip.shape[-1], activation="tanh", dtype=policy)(hidden)
        hidden = layers.LayerNormalization(dtype=policy)(hidden + skip)
    outputs = layers.Dense(1, dtype="float32")(hidden)
    return compiled(keras.Model(inputs, outputs), keras.optimizers.Adam(0.05, epsilon=1e-2))


@pytest.mark.parametrize(
    ("order", "micro_batches"),
    [("gpipe", 3), ("1f1b", 5), ("1f1b", 1), ("interleaved", 4), ("zb", 6), ("zb", 2)],
)
def test_four_devices_with_skip_connections(order: str, micro_batches: int) -> None:
    pipeline = Pipeline(4, order=order, micro_batches=micro_batches)
    trainer = tfdist.Trainer(with_skips, strategy=pipeline)
    assert_trains_as_keras(trainer, with_skips(), **FIT, epochs=2)
    assert len({v.value.device for v in trainer.model.trainable_variables}) == 4


def test_resumes_under_another_strategy_and_back(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    stops = [("pipeline", "train 3"), ("mirrored", "train 3"), ("pipeline", "train 3")]
    for strategy, stop in stops:
        with pytest.raises(KeyboardInterrupt):
            fit(folder, strategy, stop, build_model=without_random_layers)
    resumed = fit(folder, "pipeline", build_model=without_random_layers)
    whole = fit(tmp_path / "other", build_model=without_random_layers)
    assert_same_weights(resumed.model, whole.model)


def test_a_saved_model_loads_in_plain_keras(tmp_path: Path) -> None:
    trainer = tfdist.Trainer(with_skips, strategy=Pipeline(2))
    trainer.fit(**FIT)
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_same_weights(loaded, trainer.model)
    outputs = trainer.predict(X, batch_size=7, verbose=0)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), outputs, rtol=1e-5, atol=1e-6)
    for model in (loaded, trainer.model):  # both continue in plain Keras
        model.fit(**FIT)
    assert_same_weights(trainer.model, loaded)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_matches_plain_keras(policy: str) -> None:
    def build() -> keras.Model:
        return with_skips(policy)

    plain = build()
    before = [v.numpy() for v in plain.trainable_variables]
    plain.fit(**FIT, epochs=2)
    trainer = tfdist.Trainer(build, strategy=Pipeline(2))
    trainer.fit(**FIT, epochs=2)
    for old, one, other in zip(
        before, plain.trainable_variables, trainer.model.trainable_variables, strict=True
    ):
        assert other.value.dtype == "float32"
        moved = np.abs(one.numpy() - old).max()
        assert np.abs(one.numpy() - other.numpy()).max() < 0.1 * moved + 1e-3


def test_recompiled_and_frozen_models() -> None:
    strategy, trainers, plain = Pipeline(2), [], with_skips()
    trainers = [tfdist.Trainer(with_skips, strategy=strategy) for _ in range(2)]
    for change in ("nothing", "compile", "freeze"):
        for model in [plain, *(trainer.model for trainer in trainers)]:
            if change == "freeze":
                model.layers[1].trainable = False
            if change != "nothing":
                model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        plain.fit(**FIT)
        for trainer in trainers:
            trainer.fit(**FIT)
    for trainer in trainers:
        assert_same_weights(trainer.model, plain)
