"""Parameter servers in line. A process that joined a cluster is no longer good for other tests:
the tests run in one of their own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.training import FIT, X, Y, build, copies, steps
from tfdist.errors import ClusterError, ConfigurationError
from tfdist.strategies.parameter_server import ParameterServer

ROWS = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
LABELS = (ROWS[:, :1] > 0).astype("float32")
SECONDS = 120.0

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def in_cluster() -> Iterator[Run]:
    """Calls a function in the process of a cluster of two workers and two servers."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    try:
        yield lambda fn, *arguments: pool.submit(fn, *arguments).result(SECONDS)
    finally:
        for process in pool._processes.values():
            process.kill()
        pool.shutdown()


def trainer(build_model: Any = build, **options: Any) -> tfdist.Trainer:
    return tfdist.Trainer(build_model, ParameterServer(2, num_servers=2), **options)


def classifier() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, "relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.1),
            layers.Dense(1, "sigmoid"),
        ]
    )
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([39], [0.05, 0.0])
    metrics = ["accuracy", keras.metrics.AUC(), keras.metrics.TruePositives(name="tp")]
    model.compile(keras.optimizers.Adam(schedule), "binary_crossentropy", metrics=metrics)
    return model


def trained() -> dict[str, Any]:
    one = trainer(classifier)
    history = one.fit(
        ROWS, LABELS, batch_size=8, epochs=3, verbose=0, validation_data=(ROWS, LABELS)
    ).history
    model = one.model
    evaluated = one.evaluate(ROWS, LABELS, batch_size=33, verbose=0, return_dict=True)
    predicted = one.predict(ROWS, batch_size=33, verbose=0)
    restored = keras.models.model_from_json(model.to_json())
    return {
        "history": history,
        "steps": steps(model),
        "counts": [float(m.count.numpy()) for m in model.metrics if hasattr(m, "count")],
        "devices": {w.value.device for w in model.trainable_variables},
        "weights": model.get_weights(),
        "evaluated": evaluated,
        "predicted": predicted,
        "summary": one.strategy.summary(),
        "described": one.describe(),
        "json": restored.to_json(),
    }


@pytest.fixture(scope="module")
def result(in_cluster: Run) -> dict[str, Any]:
    return in_cluster(trained)


def test_two_workers_train(result: dict[str, Any]) -> None:
    losses = result["history"]["val_loss"]
    assert losses[-1] < 0.7 * losses[0] or losses[-1] < 0.1
    assert result["evaluated"]["accuracy"] > 0.9


def test_counts_are_exact(result: dict[str, Any]) -> None:
    assert result["steps"] == 3 * 40
    assert all(count == 320 for count in result["counts"])


def test_schedule_goes_by_the_updates(result: dict[str, Any]) -> None:
    # The learning rate falls to zero with the first step of the second epoch.
    accuracy = result["history"]["val_loss"]
    assert accuracy[0] != accuracy[1]
