"""BatchNorm by default: per-replica moments, and moving statistics averaged over all replicas."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tfdist.strategies import mirrored_variables

STRATEGIES = ["mirrored", "central_storage", "towers"]
MOMENTUM = 0.7


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    norm = layers.BatchNormalization(momentum=MOMENTUM)
    model = keras.Sequential([keras.Input((3,)), norm, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def rows(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(2)
    x = random.normal(2.0, 1.5, size=(num_rows, 3)).astype("float32")
    return x, np.sum(np.sin(x), axis=1, keepdims=True)


def expected_moving_statistics(
    x: np.ndarray, mean: np.ndarray, variance: np.ndarray, num_replicas: int
) -> tuple:
    """Returns the statistics after a batch: the replicas' moments, weighted by their rows."""
    cuts = [len(x) * i // num_replicas for i in range(1, num_replicas)]
    replica_rows = [share for share in np.split(x, cuts) if len(share)]
    new_mean = sum(len(s) * s.mean(axis=0) for s in replica_rows) / len(x)
    new_variance = sum(len(s) * s.var(axis=0) for s in replica_rows) / len(x)
    return (
        MOMENTUM * mean + (1 - MOMENTUM) * new_mean,
        MOMENTUM * variance + (1 - MOMENTUM) * new_variance,
    )


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moving_statistics_average_all_replicas(strategy: str, num_replicas: int) -> None:
    """Also after the last batch, which has one row: the other replicas must not contribute NaN."""
    x, y = rows(15)
    trainer = tfdist.Trainer(build, strategy=strategy, devices=num_replicas)
    trainer.fit(x, y, batch_size=7, shuffle=False, verbose=0)
    mean, variance = np.zeros(3), np.ones(3)
    for begin in range(0, 15, 7):
        mean, variance = expected_moving_statistics(
            x[begin : begin + 7], mean, variance, num_replicas
        )
    found = trainer.model.get_weights()[2:4]
    np.testing.assert_allclose(found, [mean, variance], rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_validation_evaluation_and_saved_model_agree(strategy: str, tmp_path: Path) -> None:
    x, y = rows(15)
    trainer = tfdist.Trainer(build, strategy=strategy, devices=2)
    history = trainer.fit(x, y, batch_size=7, epochs=3, verbose=0, validation_data=(x, y)).history
    evaluated = trainer.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    in_keras = loaded.evaluate(x, y, batch_size=15, verbose=0, return_dict=True)
    for name, value in in_keras.items():
        assert evaluated[name] == pytest.approx(value, rel=1e-5)
        assert history[f"val_{name}"][-1] == pytest.approx(value, rel=1e-5)
    predicted = loaded.predict(x, verbose=0)
    np.testing.assert_allclose(trainer.predict(x, batch_size=4, verbose=0), predicted, rtol=1e-5)
    for mine, theirs in zip(trainer.model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_replicas_have_equal_statistics() -> None:
    x, y = rows(15)
    trainer = tfdist.Trainer(build, strategy="mirrored", devices=3)
    trainer.fit(x, y, batch_size=7, epochs=2, verbose=0)
    for variable in trainer.model.variables:
        copies = mirrored_variables.copies_of(variable.value).values()
        assert len(copies) == 2
        for copy in copies:
            np.testing.assert_array_equal(variable, copy)
