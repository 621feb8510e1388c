"""The trial: a small network, trained under a strategy and by plain Keras on one device.

It has what a strategy most easily gets wrong: batches that the replicas share unevenly, a last one
that leaves some without rows, BatchNorm over the global batch, clipping, and momentum, which
carries every error on.
"""

from __future__ import annotations

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.strategies import copies
from tfdist.strategies.base import Strategy
from tfdist.trainer import Trainer
from tfdist.verify.results import Result, collect, differences
from tfdist.verify.verdict import Verdict

_FEATURES, _CLASSES, _EPOCHS = 8, 3, 3
#: So many that both kernels have 1024 numbers, from which on strategies keep parts of them.
_UNITS = 352

#: In the place of infinity, which makes NaNs of the sums that workers exchange.
_INFINITE = 1e30


def judge(strategy: Strategy) -> Verdict:
    """Makes a trial; every worker makes it.

    Args:
        strategy: New in this process.

    Raises:
        ConfigurationError: The strategy promises no equal numbers.
    """
    if strategy.inexact:
        why = "; ".join(f"{name}: {why}" for name, why in strategy.inexact.items())
        raise ConfigurationError(
            f"strategy {strategy.name!r} as asked for promises other numbers than one device "
            f"({why}): verify it with --devices 1."
        )
    # It rounds products by the shape of the whole, which differs between a batch and its shares.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    trainer = Trainer(_build, strategy, sync_batch_norm=True)
    found, fingerprint = _train(trainer, trainer.model, strategy.num_replicas)
    reference = _build()
    wanted, _ = _train(reference, reference, strategy.num_replicas)
    off = differences(found, wanted)
    table = strategy.gather([min(off[0].times, _INFINITE), fingerprint])
    return Verdict(
        strategy.name,
        strategy.num_workers,
        strategy.num_replicas,
        off,
        [rank for rank, (times, _) in enumerate(table) if times > 1.0],
        [rank for rank, (_, print_) in enumerate(table) if print_ < 0 or print_ != table[0][1]],
    )


def _build() -> keras.Model:
    """Returns the compiled network, always with the same weights."""
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
    """Trains and evaluates: two batches that no number of replicas divides, and one of few rows.

    Returns:
        What came of it, and the fingerprint of the weights that were trained.
    """
    random, batch_size = np.random.default_rng(0), 6 * num_replicas + 1
    rows = 2 * batch_size + max(1, num_replicas // 2)
    x = random.normal(size=(rows, _FEATURES)).astype("float32")
    y = random.integers(0, _CLASSES, rows)
    fit: dict[str, Any] = {"batch_size": batch_size, "verbose": 0}
    history = trainer.fit(x, y, epochs=_EPOCHS, shuffle=False, **fit)
    fingerprint = _fingerprint(model)  # an evaluation begins with copies made equal
    return collect(model, history, trainer.evaluate(x, y, return_dict=True, **fit)), fingerprint


def _fingerprint(model: keras.Model) -> float:
    """A number that tells weights apart to the bit; -1 where copies in this process differ."""
    of_devices = [[w.value, *copies.of(w.value).values()] for w in model.weights]
    prints = {
        zlib.crc32(b"".join(w.numpy().tobytes() for w in weights))
        for weights in zip(*of_devices, strict=True)
    }
    return float(prints.pop()) if len(prints) == 1 else -1.0
