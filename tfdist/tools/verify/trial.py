"""The trial: a small network, trained under a strategy and with plain Keras on one device.

It covers the features that are most difficult for a strategy: uneven per-replica batches, a partial
batch that leaves some replicas without rows, BatchNorm over the global batch, clipping, and
momentum, which propagates every error.
"""

from __future__ import annotations

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.strategies import mirrored_variables
from tfdist.strategies.base import Strategy
from tfdist.tools.verify.results import Result, Verdict, collect, differences
from tfdist.trainer import Trainer

_FEATURES, _CLASSES, _EPOCHS = 8, 3, 3
#: Large enough for both kernels to have 1024 elements, the minimum size for sharding.
_UNITS = 352

#: Replaces infinity, which would turn sums over workers into NaN.
_INFINITE = 1e30


def judge(strategy: Strategy) -> Verdict:
    """Runs a trial; every worker has to call this.

    Args:
        strategy: A strategy that has not been used in this process.

    Raises:
        ConfigurationError: The strategy does not match single-device training by design.
    """
    if strategy.inexact:
        why = "; ".join(f"{name}: {why}" for name, why in strategy.inexact.items())
        raise ConfigurationError(
            f"strategy {strategy.name!r} does not match single-device training in this "
            f"configuration ({why}). Verify it with --devices 1."
        )
    # Rounding of TensorFloat-32 depends on the batch shape, which differs between replicas and one
    # device.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    trainer = Trainer(_build, strategy, sync_batch_norm=True)
    result, fingerprint = _train(trainer, trainer.model, strategy.num_replicas)
    reference = _build()
    expected, _ = _train(reference, reference, strategy.num_replicas)
    differing = differences(result, expected)
    table = strategy.group.gather([min(differing[0].times, _INFINITE), fingerprint])
    return Verdict(
        strategy.name,
        strategy.group.size,
        strategy.num_replicas,
        differing,
        [rank for rank, (times, _) in enumerate(table) if times > 1.0],
        [rank for rank, (_, print_) in enumerate(table) if print_ < 0 or print_ != table[0][1]],
    )


def _build() -> keras.Model:
    """Returns the compiled network; its initial weights are always the same."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((_FEATURES,)),
            layers.Dense(_UNITS, activation="tanh", name="hidden"),
            layers.BatchNormalization(momentum=0.9),
            layers.Dense(_CLASSES, name="logits"),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def _train(
    trainer: Trainer | keras.Model, model: keras.Model, num_replicas: int
) -> tuple[Result, float]:
    """Trains and evaluates on two batches that are split unevenly, and on a smaller one."""
    random, batch_size = np.random.default_rng(0), 6 * num_replicas + 1
    rows = 2 * batch_size + max(1, num_replicas // 2)
    x = random.normal(size=(rows, _FEATURES)).astype("float32")
    y = random.integers(0, _CLASSES, rows)
    fit: dict[str, Any] = {"batch_size": batch_size, "verbose": 0}
    history = trainer.fit(x, y, epochs=_EPOCHS, shuffle=False, **fit)
    fingerprint = _fingerprint(model)  # before `evaluate`, which synchronizes the replicas
    return collect(model, history, trainer.evaluate(x, y, return_dict=True, **fit)), fingerprint


def _fingerprint(model: keras.Model) -> float:
    """Returns a checksum of the weights, or -1 if they differ between replicas in this process."""
    of_devices = [[w.value, *mirrored_variables.copies_of(w.value).values()] for w in model.weights]
    prints = {
        zlib.crc32(b"".join(w.numpy().tobytes() for w in weights))
        for weights in zip(*of_devices, strict=True)
    }
    return float(prints.pop()) if len(prints) == 1 else -1.0
