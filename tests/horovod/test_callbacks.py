"""Horovod callbacks in plain `fit` on two ranks."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.horovod.conftest import Run
from tests.horovod.training import X, Y, dense, fit, sgd


def test_all_ranks_start_from_the_root_rank(run: Run) -> None:
    first, second = run("start_from_rank_1")
    assert first["kernel"] == second["kernel"] == [[1.0]] * 4
    assert [first["bias"], second["bias"]] == [[0.0], [1.0]], "local variables were broadcast"
    assert first["steps"] == second["steps"] == 11
    assert second["seeds"] == [1]
    assert first["seeds"] != [1], "both ranks would draw the same masks"


def test_unbuilt_model_starts_from_the_root_rank(run: Run) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    fit(model, sgd(), (X, Y), 1)
    for weights in run("without_input"):
        for one, alone in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(one, alone, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("without_the_optimizer", "compile the model with tfdist.horovod.DistributedOptimizer"),
        ("different_shapes", "The ranks built different models: "),
        ("different_numbers_of_batches", "The ranks have 2, 3 batches per epoch"),
        ("scheduled_twice", "the optimizer has a LearningRateSchedule"),
    ],
)
def test_unsupported_programs_raise(program: str, expected: str, run: Run) -> None:
    for message in run(program):
        assert expected in message


def test_metrics_cover_all_rows(run: Run) -> None:
    first, second = run("metrics_of_uneven_shards")
    assert first == second
    model = dense()
    auc = keras.metrics.AUC(num_thresholds=20, from_logits=True)
    model.compile("sgd", "mse", metrics=["mae", auc])
    shards = [(X[:36], Y[:36] > 0), (X[36:], Y[36:] > 0)]
    validation = [[rows[::-1][:-3] for rows in shard] for shard in shards]
    for prefix, parts in (("", shards), ("val_", validation)):
        x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
        for name, value in model.evaluate(x, y, verbose=0, return_dict=True).items():
            name = name.replace(auc.name, "auc")
            result = next(v for k, v in first.items() if k.startswith(prefix + name))
            np.testing.assert_allclose(result, [value, value], 1e-5)


def test_learning_rate_rises_and_falls(run: Run) -> None:
    rise = [0.4 * (0.5 + 0.5 * batch / 8) for batch in range(1, 9)]
    for answer in run("learning_rates"):
        np.testing.assert_allclose(answer["batches"], rise + [0.4] * 4 + [0.04] * 4, 1e-6)
        np.testing.assert_allclose(answer["epochs"], [0.3, 0.4, 0.4, 0.04], 1e-6)


def test_velocity_follows_the_learning_rate(run: Run) -> None:
    # Steps: 0.1, then 0.9 of that at twice the rate, and 0.2.
    for (weights,) in run("velocity"):
        np.testing.assert_allclose(weights, 50.0 - 0.1 - (0.9 * 0.2 + 0.2), 1e-6)
