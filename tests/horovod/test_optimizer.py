"""Two ranks with a DistributedOptimizer in plain Keras, against one device."""

from __future__ import annotations

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.horovod.conftest import Run
from tests.horovod.training import CASES, X, Y, dense, fit, sgd


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device_with_the_global_batch(name: str, run: Run) -> None:
    case = CASES[name]
    model = case.model()
    before = model.get_weights()
    case.train(model, (case.alone or case.optimizer)(), case.rows, 1)
    wanted = model.get_weights()
    assert np.abs(wanted[0] - before[0]).max() > 0.03  # far more than the tolerance
    first, second = run(f"train {name}")
    for one, other, alone in zip(first, second, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, alone, case.tolerance, case.tolerance)


@pytest.mark.parametrize("program", ["loss_scale_outside", "loss_scale_inside"])
def test_overflow_on_one_rank_skips_the_step_on_all(program: str, run: Run) -> None:
    first, second = run(program)
    np.testing.assert_equal(first, second)
    assert first["steps"] == 5
    assert first["scale"] == 4.0
    assert all(np.isfinite(w).all() for w in first["weights"])


def test_saves_as_the_plain_optimizer(run: Run) -> None:
    path, _ = run("saved")
    loaded = keras.models.load_model(path)
    shutil.rmtree(Path(path).parent)
    model = dense()
    fit(model, sgd(clipnorm=0.1), (X, Y), 1)
    assert type(loaded.optimizer) is keras.optimizers.SGD
    config, wanted = loaded.optimizer.get_config(), model.optimizer.get_config()
    assert {**config, "name": ""} == {**wanted, "name": ""}
    for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-5)
    loaded.fit(X, Y, verbose=0)  # alone


def test_loaded_optimizer_reduces_gradients(run: Run) -> None:
    assert run("loaded") == [1, 1]


def test_xla_is_disabled_with_a_warning(run: Run) -> None:
    for answer in run("with_xla"):
        assert answer == {"distributed": False, "warned": True, "other": True}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("twice", "This optimizer is already distributed"),
        ("subset_of_ranks", "To sum over fewer, call hvd.allreduce"),
        ("local_weights", "register_local_var is not supported: "),
        ("in_the_trainer", "Compile the model with the plain optimizer"),
        ("passes_of_a_built_optimizer", "Set the number when you create the optimizer"),
    ],
)
def test_unsupported_programs_raise(program: str, expected: str, run: Run) -> None:
    for message in run(program):
        assert expected in message


def test_batch_norm_over_all_ranks_equals_one_device(run: Run) -> None:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(momentum=0.5)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    fit(model, sgd(), (X, Y), 1)
    for weights in run("batch_norm"):
        for one, alone in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(one, alone, 1e-4, 1e-4)


def test_collective_operations_return_the_values_of_horovod(run: Run) -> None:
    for rank, answer in enumerate(run("operations")):
        assert answer == {
            "average": 0.5,
            "sum": 1.0,
            "gathered": [0.0, 7.0, 1.0, 7.0],
            "scattered": [1.0 + rank],
            "broadcast": 1.0,
            "Horovod's": [True, True, 2],
            "variables": [[1, 2**32 - 2], [1.0], 1.0],
            "ranks": [rank, 2, rank, 2],
            "tfdist": [rank, 2],
        }
