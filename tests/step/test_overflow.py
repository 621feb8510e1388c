"""Mixed precision: an overflow on one replica, or of their sum, skips the step on all replicas.

As in Keras, the moving statistics of BatchNormalization are still updated.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tfdist import precision

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


class CustomStep(keras.Model):
    """A step with a loss whose gradients by row are larger for a part of the batch."""

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.abs(self(data[0], training=True) - data[1]))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("strategy", "model", "options", "num_batches", "size"),
    [
        ("mirrored", keras.Model, {}, 1, 1),
        pytest.param("mirrored", keras.Model, {"jit_compile": True}, 1, 1, marks=pytest.mark.long),
        ("mirrored", keras.Model, {"run_eagerly": True}, 1, 1),
        ("mirrored", keras.Model, {}, 2, 1),
        ("mirrored", CustomStep, {}, 1, 1),
        ("mirrored", CustomStep, {}, 1, 1e-3),  # overflows by row, not in gradients of weights
        ("sharded", keras.Model, {}, 1, 1),
        pytest.param("pipeline", keras.Model, {}, 1, 1, marks=pytest.mark.long),
    ],
)
def test_sum_of_replicas_overflows_as_on_one_device(
    strategy: str, model: type[keras.Model], options: dict[str, bool], num_batches: int, size: float
) -> None:
    """There, float16 has to hold the sum over all rows. Each replica has that of half of them."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,))
        hidden = layers.Dense(2, kernel_regularizer="l2")(inputs * size)
        hidden = layers.BatchNormalization()(hidden, training=False)
        outputs = layers.Dense(1, use_bias=size == 1)(hidden)
        built = model(inputs, layers.Activation("linear", dtype="float32")(outputs))
        every = num_batches if num_batches > 1 else None
        inner = keras.optimizers.SGD(1e-6, gradient_accumulation_steps=every)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**20)
        built.compile(optimizer, "mae", **options)
        return built

    x, y = np.ones((NUM_ROWS, 3), "float32"), np.full((NUM_ROWS, 1), 9, "float32")
    fit = {"batch_size": NUM_ROWS // num_batches, "epochs": 8, "verbose": 0}
    with precision.policy("mixed_float16"):
        expected = build()
        expected.fit(x, y, **fit)
    trainer = tfdist.Trainer(build, strategy, devices=2, precision="mixed_float16")
    trainer.fit(x, y, **fit)
    result = trainer.model.optimizer
    assert int(result.iterations) == int(expected.optimizer.iterations) > 0
    assert float(result.dynamic_scale) == float(expected.optimizer.dynamic_scale) < 2.0**20
