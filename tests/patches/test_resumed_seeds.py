"""Seeds of layers, losses and metrics continue after a resume with another number of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
from keras import layers, ops

from tests.support.training import X, Y, assert_close, assert_same_weights
from tfdist import Trainer
from tfdist.checkpoint.settings import Checkpoints

FIT: dict[str, Any] = {"x": X, "y": Y, "batch_size": 7, "shuffle": False, "verbose": 0}


class NoisyError(keras.losses.Loss):
    """The squared error with labels that have noise."""

    def __init__(self) -> None:
        super().__init__(name="noisy_error")
        self.seed = keras.random.SeedGenerator(5)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        noise = keras.random.normal(ops.shape(y_pred), seed=self.seed)
        return ops.mean((y_true + 0.3 * noise - y_pred) ** 2, axis=-1)


class NoisyMean(keras.metrics.Mean):
    """The mean of the outputs with noise."""

    def __init__(self) -> None:
        super().__init__(name="noisy_mean")
        self.seed = keras.random.SeedGenerator(3)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        noise = keras.random.uniform(ops.shape(y_pred), seed=self.seed)
        return super().update_state(y_pred + noise, sample_weight)


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    stack = [layers.Dense(6, "tanh"), layers.Dropout(0.4, seed=2), layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *stack])
    model.compile(keras.optimizers.SGD(0.1), NoisyError(), metrics=[NoisyMean()])
    return model


def test_random_numbers_continue_with_another_number_of_replicas(tmp_path: Path) -> None:
    plain = build()
    history = plain.fit(**FIT, epochs=3).history
    for replicas, epochs in ((2, 1), (3, 2), (1, 3)):
        checkpoints = Checkpoints(folder=tmp_path)
        trainer = Trainer(build, "towers", devices=replicas, checkpoints=checkpoints)
        result = trainer.fit(**FIT, epochs=epochs).history
    assert_same_weights(trainer.model, plain)
    assert_close(
        {name: values[-1:] for name, values in result.items()},
        {name: values[-1:] for name, values in history.items()},
    )
