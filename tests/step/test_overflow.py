"""Mixed precision: an overflow on one replica skips the step on all replicas.

As in Keras, the moving statistics of BatchNormalization are still updated.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import tfdist

STRATEGIES = ["one_device", "mirrored", "central_storage", "towers"]
NUM_ROWS = 8


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, "mse")
    return model


def rows(overflowing: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns labels near 0. One of 1e4 has a gradient of 2e4 / 8, which overflows times 2^15."""
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_ROWS, 3)).astype("float32")
    y = 0.1 * random.normal(size=(NUM_ROWS, 1)).astype("float32")
    if overflowing is not None:
        y[overflowing] = 1e4
    return x, y


def first_copy(variable: keras.Variable) -> np.ndarray:
    return np.asarray(getattr(variable.value, "values", (variable.value,))[0])


def state(trainer: tfdist.Trainer) -> dict[str, np.ndarray]:
    """Returns all state that a skipped step does not change."""
    optimizer = trainer.model.optimizer.inner_optimizer
    state = {f"weight {i}": w for i, w in enumerate(trainer.model.trainable_weights)}
    state |= {f"optimizer {v.path}": v for v in optimizer.variables}
    state["iterations"] = optimizer.iterations
    return {name: first_copy(v) for name, v in state.items()}


def moving_statistics(trainer: tfdist.Trainer) -> np.ndarray:
    """Returns the moving means and variances of BatchNormalization."""
    layer = trainer.model.layers[1]
    return np.stack([first_copy(v) for v in (layer.moving_mean, layer.moving_variance)])


@pytest.mark.parametrize("row", [0, NUM_ROWS - 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_overflow_on_one_replica_skips_the_step_on_all(strategy: str, row: int) -> None:
    devices = 1 if strategy == "one_device" else 2
    trainer = tfdist.Trainer(build, strategy=strategy, devices=devices, precision="mixed_float16")
    fit = {"batch_size": NUM_ROWS, "shuffle": False, "verbose": 0}
    trainer.fit(*rows(None), **fit)  # creates all state, including momentum
    before, statistics = state(trainer), moving_statistics(trainer)

    logs = trainer.fit(*rows(row), **fit).history
    assert logs["loss_scale"] == [2.0**14]
    assert logs["skipped_steps"] == [1]
    for name, value in state(trainer).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert np.isfinite(moving_statistics(trainer)).all()
    assert not np.array_equal(moving_statistics(trainer), statistics)

    logs = trainer.fit(*rows(None), **fit).history
    assert logs["loss_scale"] == [2.0**14]
    assert logs["skipped_steps"] == [1]
    after = state(trainer)
    assert after["iterations"] == before["iterations"] + 1 == 2
    assert not np.array_equal(after["weight 0"], before["weight 0"])
