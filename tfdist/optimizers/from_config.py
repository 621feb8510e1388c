"""The optimizer that a configuration asks for."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.config import TrainConfig
from tfdist.optimizers.lars import LARS
from tfdist.optimizers.momentum_sgd import MomentumSGD
from tfdist.optimizers.weight_decay import leave_biases_and_norms
from tfdist.schedules import LearningRate


def create(config: TrainConfig, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Returns the optimizer, with its weight decay and its averages of weights.

    Args:
        config: Names it: `adam` and `lamb` are Keras's, whose decay is apart from the gradient;
            `sgd` and `lars` are `MomentumSGD` and `LARS`. Biases and normalisation never decay.
        learning_rate: `schedules.learning_rate(config, steps_per_epoch)`.
    """
    options: dict[str, Any] = {"weight_decay": config.weight_decay or None}
    if config.ema is not None:
        options |= {"use_ema": True, "ema_momentum": config.ema}
    if config.optimizer == "sgd":
        return MomentumSGD(learning_rate, config.momentum, **options)
    if config.optimizer == "lars":
        return LARS(learning_rate, config.momentum, **options)
    chosen = keras.optimizers.Lamb if config.optimizer == "lamb" else keras.optimizers.Adam
    return leave_biases_and_norms(chosen(learning_rate, **options))
