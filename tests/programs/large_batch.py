"""Programs for large batches: growing batches, warm-up, layer-wise learning rates."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

from tests.programs.program import program
from tests.support.case import compiled, mlp, positioned
from tests.support.data import points, tokens
from tfdist import Trainer, schedules
from tfdist.optimizers import LARS, MomentumSGD

SIZES = {0: 3, 1: 5, 3: 15}


def _growing(runner: Any, arguments: dict[str, Any]) -> keras.callbacks.History:
    """Calls `fit` once with a Trainer, or with Keras once for each batch size."""
    if isinstance(runner, Trainer):
        return runner.fit(**{**arguments, "batch_size": SIZES})
    ends = [*SIZES, arguments["epochs"]][1:]
    logs: dict[str, list[float]] = {}
    for (begin, size), end in zip(SIZES.items(), ends, strict=True):
        part = {"batch_size": size, "initial_epoch": begin, "epochs": end}
        history = runner.fit(**{**arguments, **part})
        for name, values in history.history.items():
            logs[name] = logs.get(name, []) + values
    history.history, history.epoch = logs, list(range(ends[-1]))
    return history


@program(points(), batch_size=min(SIZES.values()), epochs=5, train=_growing, quick=True)
def growing_batches() -> keras.Model:
    """`fit(batch_size={0: 3, 1: 5, 3: 15})`: batches that grow, with a rate that goes by steps."""
    rate = keras.optimizers.schedules.PolynomialDecay(0.3, 12)
    return compiled(mlp(), keras.optimizers.SGD(rate, momentum=0.9), metrics=["mae"])


@program(tokens(), epochs=3)
def lars_with_warmup() -> keras.Model:
    """`LARS` after a warm-up, on an embedding whose gradients are sparse."""
    rate = schedules.polynomial(0.5, 9, warmup_steps=3, start=0.1)
    return compiled(positioned(), LARS(rate, weight_decay=0.1, trust=0.1))


@program(points(), epochs=3, sync_batch_norm=True)
def one_hour_recipe() -> keras.Model:
    """`MomentumSGD` with momentum correction, decay of kernels, warm-up and steps."""
    rate = schedules.step(0.2, [4, 6], warmup_steps=2, start=0.05)
    parts = [layers.Dense(5), layers.BatchNormalization(), layers.ReLU(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *parts])
    return compiled(model, MomentumSGD(rate, weight_decay=0.05))
