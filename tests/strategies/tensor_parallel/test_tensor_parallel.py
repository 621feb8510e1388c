"""Tensor parallelism: results, placement of shards, and a model that appears complete to users."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.training import (
    assert_close,
    assert_optimizers_match,
    assert_resumes_from_another_strategy,
    building,
)
from tfdist.errors import UnsupportedModelError
from tfdist.models import alexnet
from tfdist.strategies.sharded.plan import bytes_by_device
from tfdist.strategies.tensor_parallel.strategy import TensorParallel
from tfdist.trainer import Trainer

LONG = pytest.mark.long
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(1, 11, (14, 5)).astype("int32")
IDS[::3, 3:] = 0
LABELS = RANDOM.integers(0, 3, (14,))
FIT: dict[str, Any] = {"x": IDS, "y": LABELS, "batch_size": 6, "shuffle": False, "verbose": 0}


def text(policy: str | None = None, optimizer: Any = None) -> keras.Model:
    """Returns a model with a table, heads, masks, column and row splits, and a softmax."""
    keras.utils.set_random_seed(1)
    options = {"dtype": policy}
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(11, 9, mask_zero=True, **options)(inputs)
    hidden = hidden + layers.MultiHeadAttention(3, 4, dropout=0.3, seed=5, **options)(
        hidden, hidden
    )
    more = layers.Dense(15, activation="gelu", kernel_regularizer="l2", **options)(hidden)
    hidden = layers.LayerNormalization(**options)(hidden + layers.Dense(9, **options)(more))
    hidden = layers.Dropout(0.2, seed=3)(layers.GlobalAveragePooling1D(**options)(hidden))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax", dtype="float32")(hidden))
    optimizer = optimizer or keras.optimizers.Adam(0.05, epsilon=1e-2, global_clipnorm=0.5)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def momentum() -> keras.Model:
    """Returns the same model, with training that does not amplify rounding."""
    return text(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5))


@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=LONG)])
def test_matches_one_device_and_appears_complete(devices: int, tmp_path: Path) -> None:
    plain, trainer = text(), Trainer(text, TensorParallel(devices, smallest=1))
    assert trainer.describe()["split"].startswith("95.7% of 922 parameters")
    wanted = plain.fit(**FIT, epochs=2).history
    assert_close(trainer.fit(**FIT, epochs=2).history, wanted)
    assert_close(trainer.model.get_weights(), plain.get_weights())
    assert_optimizers_match(trainer.model, plain)
    held = bytes_by_device(trainer.model.trainable_variables)
    assert set(held) == {f"CPU:{i}" for i in range(devices)}
    assert max(held.values()) < 0.65 * sum(held.values())  # one device has two of three heads
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    outputs = plain.predict(IDS, verbose=0)
    for predicted in (loaded.predict(IDS, verbose=0), trainer.predict(IDS, verbose=0)):
        assert_close(predicted, outputs)
    with pytest.raises(UnsupportedModelError, match="divided by the strategy of its"):
        trainer.model.fit(**FIT)


@LONG
def test_resumes_from_another_strategy_and_back(tmp_path: Path) -> None:
    assert_resumes_from_another_strategy(momentum, TensorParallel(2, smallest=1), FIT, tmp_path)


@LONG
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_matches_one_device(policy: str) -> None:
    def build() -> keras.Model:
        return text(policy)

    before, trainers = [v.numpy() for v in build().trainable_variables], []
    for strategy in ("one_device", TensorParallel(2, smallest=1)):
        trainers.append(Trainer(build, strategy))
        trainers[-1].fit(**FIT, epochs=2)
    pairs = zip(*(trainer.model.trainable_variables for trainer in trainers), strict=True)
    for old, (one, other) in zip(before, pairs, strict=True):
        assert other.dtype == "float32"
        moved = np.abs(one.numpy() - old).max()
        assert np.abs(one.numpy() - other.numpy()).max() < 0.1 * moved + 1e-3


@LONG
def test_averaging_accumulating_recompiling_and_freezing() -> None:
    models = []
    for strategy in ("one_device", TensorParallel(2, smallest=1)):
        trainer = Trainer(momentum, strategy, accumulate=2)
        models.append(trainer.model)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        trainer.model.compile(
            keras.optimizers.SGD(0.1, use_ema=True), "sparse_categorical_crossentropy"
        )
        trainer.fit(**FIT, epochs=2, callbacks=[swap], validation_data=(IDS, LABELS))
        trainer.model.layers[1].trainable = False
        for optimizer in (keras.optimizers.Lamb(0.01), keras.optimizers.SGD(0.1, momentum=0.9)):
            trainer.model.compile(optimizer, "sparse_categorical_crossentropy")
            trainer.fit(**FIT)
    assert_close(models[1].get_weights(), models[0].get_weights())


@LONG
def test_alexnet_over_two_devices_matches_one_device() -> None:
    x = RANDOM.standard_normal((6, 67, 67, 3)).astype("float32")
    y = RANDOM.integers(0, 5, (6,))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    momentum = partial(keras.optimizers.SGD, 0.05, momentum=0.9)
    build = building(partial(alexnet, (67, 67, 3), 5, width=1 / 16), momentum, loss=loss)

    plain, trainer = build(), Trainer(build, TensorParallel(2, smallest=1))
    fit = {"x": x, "y": y, "batch_size": 4, "shuffle": False, "verbose": 0}
    plain.fit(**fit)
    trainer.fit(**fit)
    assert_close(trainer.model.get_weights(), plain.get_weights())
    assert "and 100.0% of the work over 2 devices" in trainer.describe()["split"]
