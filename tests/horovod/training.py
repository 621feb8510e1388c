"""Models and data for one device and for ranks that split each batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCHES, BATCH_SIZE = 6, 8  # of the global batch
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCHES * BATCH_SIZE, 4)).astype("float32")
Y = (X[:, :1] * X[:, 1:2] + 0.1).astype("float32")
WORDS = RNG.integers(0, 9, (BATCHES * BATCH_SIZE, 4))


def dense() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def embedding() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(9, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,), dtype="int32"), *layers])


def sgd(**options: Any) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(**({"learning_rate": 0.1, "momentum": 0.9} | options))


def adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.02, epsilon=1e-2, global_clipnorm=0.2, weight_decay=0.01)


def scaled() -> keras.optimizers.Optimizer:
    inner = sgd(global_clipnorm=0.1)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0, dynamic_growth_steps=2)


def fit(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    rows: Any,
    size: int,
    callbacks: Any = None,
) -> None:
    """Trains for two epochs with a global batch of `BATCH_SIZE`."""
    model.compile(optimizer, "mse")
    options = {"epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    model.fit(*rows, batch_size=BATCH_SIZE // size, **options)


def loop(model: keras.Model, optimizer: keras.optimizers.Optimizer, rows: Any, size: int) -> None:
    """The same in a custom training loop."""

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean(tf.square(model(x) - y)))
        weights = [v.value for v in model.trainable_variables]
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    optimizer.build(model.trainable_variables)
    for batch in tf.data.Dataset.from_tensor_slices(rows).batch(BATCH_SIZE // size).repeat(2):
        step(*batch)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training after which the ranks must have the weights of one device.

    Attributes:
        optimizer: Creates the optimizer of the ranks.
        alone: Creates the optimizer of one device; None: the same.
        options: Arguments of `DistributedOptimizer`.
        model: Creates the model.
        train: Trains it.
        tolerance: Relative and absolute.
    """

    optimizer: Callable[[], keras.optimizers.Optimizer]
    alone: Callable[[], keras.optimizers.Optimizer] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: Callable[[], keras.Model] = dense
    train: Callable[..., None] = fit
    tolerance: float = 1e-5

    @property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        return (WORDS if self.model is embedding else X), Y


CASES = {
    "clipnorm": Case(lambda: sgd(clipnorm=0.1)),
    "adam": Case(adam),
    "loop": Case(lambda: sgd(clipnorm=0.1), train=loop),
    "embedding": Case(lambda: sgd(clipnorm=0.1), model=embedding),
    "embedding as dense": Case(sgd, options={"sparse_as_dense": True}, model=embedding),
    "passes averaged": Case(
        lambda: sgd(clipnorm=0.1),
        lambda: sgd(clipnorm=0.1, gradient_accumulation_steps=2),
        {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
    ),
    "passes added up": Case(
        lambda: sgd(learning_rate=0.05),
        lambda: sgd(learning_rate=0.1, gradient_accumulation_steps=2),
        {"backward_passes_per_step": 2},
    ),
    "sum": Case(lambda: sgd(learning_rate=0.05), sgd, {"op": "Sum"}),
    "loss scale": Case(scaled),
    "loss scale in a loop": Case(scaled, train=loop),
    "fp16": Case(sgd, options={"compression": "fp16"}, tolerance=2e-3),
    "fp16 with loss scale": Case(scaled, options={"compression": "fp16"}, tolerance=2e-3),
}


def share(rows: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Returns a rank's part of each global batch."""
    by_batch = rows.reshape(BATCHES, size, BATCH_SIZE // size, *rows.shape[1:])
    return by_batch[:, rank].reshape(-1, *rows.shape[1:])
