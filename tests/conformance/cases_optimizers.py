"""Cases of optimizers, and of the other options of `compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, optimizers

from tests.support.case import case, compiled, mlp, positioned
from tests.support.data import Data, points, tokens
from tfdist.optimizers import LARS


@case(points())
def clipnorm() -> keras.Model:
    """Each gradient clipped to a norm (`clipnorm`)."""
    return compiled(mlp(), optimizers.SGD(0.5, clipnorm=0.2))


@case(points())
def global_clipnorm() -> keras.Model:
    """All gradients clipped to one norm (`global_clipnorm`)."""
    return compiled(mlp(), optimizers.SGD(0.5, global_clipnorm=0.3))


@case(points())
def clipvalue() -> keras.Model:
    """Gradients clipped by value (`clipvalue`)."""
    return compiled(mlp(), optimizers.SGD(0.5, clipvalue=0.1))


@case(points())
def moving_average() -> keras.Model:
    """Weights replaced by their moving average at the end (`use_ema`)."""
    return compiled(mlp(), optimizers.SGD(0.2, use_ema=True, ema_momentum=0.8))


@case(points())
def moving_average_overwrites() -> keras.Model:
    """Weights replaced by their moving average every few steps (`ema_overwrite_frequency`)."""
    ema = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2}
    return compiled(mlp(), optimizers.SGD(0.2, **ema))


@case(points())
def gradient_accumulation() -> keras.Model:
    """The optimizer's `gradient_accumulation_steps`."""
    return compiled(mlp(), optimizers.SGD(0.3, gradient_accumulation_steps=2))


@case(points())
def gradient_accumulation_clipped() -> keras.Model:
    """`gradient_accumulation_steps` with clipping and momentum."""
    options = {"momentum": 0.9, "global_clipnorm": 0.3, "gradient_accumulation_steps": 3}
    return compiled(mlp(), optimizers.SGD(0.3, **options))


@case(points())
def weight_decay() -> keras.Model:
    """Weight decay (AdamW) without biases."""
    optimizer = optimizers.AdamW(0.05, weight_decay=0.1, epsilon=1e-2)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return compiled(mlp(), optimizer)


@case(points())
def constraints() -> keras.Model:
    """Constraints on weights."""
    hidden = layers.Dense(3, activation="tanh", kernel_constraint=keras.constraints.UnitNorm())
    head = layers.Dense(1, kernel_constraint="non_neg")
    return compiled(keras.Sequential([keras.Input((4,)), hidden, head]))


@case(points(), epochs=3)
def learning_rate_schedule() -> keras.Model:
    """A learning-rate schedule."""
    rate = optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.3, 0.1, 0.02])
    return compiled(mlp(), optimizers.SGD(rate))


@case(points(20))
def steps_per_execution() -> keras.Model:
    """`steps_per_execution` that does not divide the steps of an epoch."""
    return compiled(mlp(), steps_per_execution=2, metrics=["mae"])


@case(points())
def jit_compile() -> keras.Model:
    """`jit_compile=True`."""
    return compiled(mlp(), jit_compile=True, metrics=["mae"])


@case(points())
def run_eagerly() -> keras.Model:
    """`run_eagerly=True`."""
    return compiled(mlp(), run_eagerly=True, metrics=["mae"])


@case(points())
def loss_scale_factor() -> keras.Model:
    """An optimizer's fixed `loss_scale_factor`."""
    return compiled(mlp(), optimizers.SGD(0.3, loss_scale_factor=64.0))


@case(points(), epochs=3)
def loss_scale() -> keras.Model:
    """A `LossScaleOptimizer` whose scale grows."""
    inner = optimizers.SGD(0.1, momentum=0.9)
    scaled = optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=3)
    return compiled(mlp(), scaled)


@case(points())
def loss_scale_clipped() -> keras.Model:
    """A `LossScaleOptimizer` whose inner optimizer clips unscaled gradients."""
    inner = optimizers.SGD(0.3, global_clipnorm=0.3)
    return compiled(mlp(), optimizers.LossScaleOptimizer(inner, initial_scale=1024.0))


def _one_row_overflows() -> Data:
    """Returns rows of which only the fifth has a scaled gradient beyond the range of float32."""
    data = points()
    x = np.array(data.x)
    x[4, 2] = 1e6
    return Data(x, data.y)


@case(_one_row_overflows())
def loss_scale_overflow() -> keras.Model:
    """A `LossScaleOptimizer` with one row that overflows: all replicas skip the step."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=2.0**115)
    return compiled(model, optimizer, "mae")


class _Seen(layers.Layer):
    """Counts rows and batches, and keeps a moving mean."""

    def build(self, shape: Any) -> None:
        zeros = {"initializer": "zeros", "trainable": False}
        self.rows = self.add_weight(name="rows", shape=(), **zeros)
        self.batches = self.add_weight(
            name="batches", shape=(), dtype="int32", initializer="zeros", trainable=False
        )
        self.mean = self.add_weight(name="mean", shape=(), **zeros)

    def call(self, inputs: Any) -> Any:
        self.rows.assign(self.rows + keras.ops.cast(keras.ops.shape(inputs)[0], "float32"))
        self.batches.assign(self.batches + 1)
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs))
        return inputs


def _one_label_overflows() -> Data:
    """Returns rows for which the fifth scaled gradient overflows, but not the forward pass."""
    data = points()
    y = np.array(data.y)
    y[4] = 1e5
    return Data(data.x, y)


@case(_one_label_overflows(), sync_batch_norm=True)
def loss_scale_overflow_state() -> keras.Model:
    """A skipped step changes the state of layers and metrics, but not the optimizer's."""
    hidden = [layers.Dense(3, "tanh"), layers.BatchNormalization(), _Seen()]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1)])
    inner = optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.8)
    scaled = optimizers.LossScaleOptimizer(inner, initial_scale=2.0**115)
    return compiled(model, scaled, metrics=["mae"])


@case(tokens(weighted=True, empty=()), epochs=3, sync_batch_norm=True)
def all_together() -> keras.Model:
    """Most of the above features together."""
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 3, mask_zero=True),
            layers.BatchNormalization(momentum=0.7),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3, activation="tanh", kernel_regularizer="l2", activity_regularizer="l2"),
            layers.Dense(1, kernel_constraint="max_norm"),
        ]
    )
    inner = optimizers.AdamW(
        optimizers.schedules.CosineDecay(0.05, 12),
        weight_decay=0.05,
        epsilon=1e-2,
        global_clipnorm=0.5,
        use_ema=True,
        ema_momentum=0.8,
        ema_overwrite_frequency=4,
        gradient_accumulation_steps=2,
    )
    loss = keras.losses.Huber(0.5, reduction="mean_with_sample_weight")
    return compiled(model, optimizers.LossScaleOptimizer(inner), loss, weighted_metrics=["mae"])


def _of_kernels(kernels: optimizers.Optimizer, others: optimizers.Optimizer) -> Any:
    """Returns an optimizer that uses one optimizer for kernels, another for all other weights."""
    return optimizers.MultiOptimizer(lambda v: kernels if v.name == "kernel" else others)


OPTIMIZERS: dict[str, Callable[[], optimizers.Optimizer]] = {
    # An epsilon of 1e-2: at 1e-7 the step is nearly the gradient's sign, which rounding can flip.
    "SGD with Nesterov momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.05, epsilon=1e-2),
    "Nadam": lambda: optimizers.Nadam(0.05, epsilon=1e-2),
    "RMSprop": lambda: optimizers.RMSprop(0.05, momentum=0.5, epsilon=1e-2, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.3, epsilon=1e-2),
    "Lamb": lambda: optimizers.Lamb(0.05, epsilon=1e-2),
    "LARS": lambda: LARS(0.5, weight_decay=0.1, trust=0.1),
    "Ftrl": lambda: optimizers.Ftrl(0.3, l1_regularization_strength=0.01),
    "Lion": lambda: optimizers.Lion(0.02),
    "Adamax": lambda: optimizers.Adamax(0.05, epsilon=1e-2),
    "Adadelta": lambda: optimizers.Adadelta(0.5, epsilon=1e-2),
    "Adafactor": lambda: optimizers.Adafactor(0.05),
    "Muon": lambda: optimizers.Muon(0.05, adam_lr_ratio=0.5, epsilon=1e-2),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.05, epsilon=1e-2),
    "MultiOptimizer": lambda: _of_kernels(
        optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1), optimizers.Adagrad(0.3, epsilon=1e-2)
    ),
}


def _optimizer_case(name: str) -> None:
    def build() -> keras.Model:
        return compiled(positioned(), OPTIMIZERS[name]())

    build.__name__ = name.split()[0].lower()
    build.__doc__ = f"The optimizer {name}, on token and position embeddings."
    case(tokens(empty=()))(build)


for _name in OPTIMIZERS:
    _optimizer_case(_name)
