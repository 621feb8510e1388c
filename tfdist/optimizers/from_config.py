"""Creates the optimizer of a configuration."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.config import TrainConfig
from tfdist.optimizers.lars import LARS
from tfdist.optimizers.momentum_sgd import MomentumSGD
from tfdist.optimizers.weight_decay import leave_biases_and_norms
from tfdist.schedules import LearningRate


def create(config: TrainConfig, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a configuration, with its weight decay and weight averaging (EMA).

    `adam` and `lamb` are Keras's optimizers, with decoupled weight decay; `sgd` and `lars` are
    `MomentumSGD` and `LARS`. Biases and normalization weights never decay.

    Example:
        >>> from tfdist.config import TrainConfig
        >>> config = TrainConfig(optimizer="lars", weight_decay=1e-4)
        >>> isinstance(optimizers.create(config, learning_rate=0.1), optimizers.LARS)
        True

    Args:
        config: The configuration.
        learning_rate: The result of `schedules.learning_rate(config, steps_per_epoch)`.
    """
    options: dict[str, Any] = {"weight_decay": config.weight_decay or None}
    if config.ema is not None:
        options |= {"use_ema": True, "ema_momentum": config.ema}
    if config.optimizer == "sgd":
        return MomentumSGD(learning_rate, config.momentum, **options)
    if config.optimizer == "lars":
        return LARS(learning_rate, config.momentum, **options)
    create_fn = keras.optimizers.Lamb if config.optimizer == "lamb" else keras.optimizers.Adam
    return leave_biases_and_norms(create_fn(learning_rate, **options))
