"""Optimizers for large batches that Keras does not have."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.config import TrainConfig
from tfdist.optimizers.large_batch import LARS, NOT_DECAYED, MomentumSGD, leave_biases_and_norms
from tfdist.schedules import LearningRate

__all__ = ["LARS", "NOT_DECAYED", "MomentumSGD", "create", "leave_biases_and_norms"]
_OF_KERAS = {
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "lamb": keras.optimizers.Lamb,
}


def create(config: TrainConfig, learning_rate: LearningRate) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a configuration, with its weight decay and weight averaging (EMA).

    `adam`, `adamw` and `lamb` are Keras's optimizers, with decoupled weight decay; `sgd` and `lars`
    are `MomentumSGD` and `LARS`. Biases and normalization weights never decay.

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
    limits = {
        "clipnorm": config.clip_norm,
        "global_clipnorm": config.global_clip_norm,
        "clipvalue": config.clip_value,
    }
    options |= {name: limit for name, limit in limits.items() if limit is not None}
    if config.ema is not None:
        options |= {"use_ema": True, "ema_momentum": config.ema}
    if config.optimizer == "sgd":
        return MomentumSGD(learning_rate, config.momentum, config.nesterov, **options)
    if config.optimizer == "lars":
        return LARS(learning_rate, config.momentum, **options)
    options |= {"beta_1": config.beta_1, "beta_2": config.beta_2}
    if config.epsilon is not None:
        options["epsilon"] = config.epsilon
    create_fn = _OF_KERAS[config.optimizer]
    if config.optimizer == "adamw":  # of which Keras refuses None
        default = create_fn().weight_decay
        options["weight_decay"] = default if config.weight_decay is None else config.weight_decay
    return leave_biases_and_norms(create_fn(learning_rate, **options))
