"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.horovod.ranks import rank, size, strategy
from tfdist.patches.batch_norm import global_moments
from tfdist.replica.replica import Replica, current
from tfdist.upstream.keras_model import compute_moments_by


def SyncBatchNormalization(**options: Any) -> keras.layers.BatchNormalization:  # noqa: N802
    """Returns a `BatchNormalization` that computes its moments over the batches of all ranks.

    It is saved and loaded as Keras's layer with `synchronized=True`; a loaded layer uses the
    moments of its rank only. Its gradients need a `DistributedOptimizer` with `op=Average`. A model
    with this layer is not compiled by XLA.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> model = keras.Sequential(
        ...     [keras.Input((8,)), keras.layers.Dense(4), hvd.SyncBatchNormalization(momentum=0.9)]
        ... )

    Args:
        **options: Arguments of `keras.layers.BatchNormalization`.
    """
    layer = keras.layers.BatchNormalization(**(options | {"synchronized": True}))

    def moments(inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        if current() is not None:  # within a tfdist.Trainer, which reduces over its replicas
            return global_moments(layer, inputs, mask)
        rows = tf.shape(inputs)[0]
        this_rank = Replica(rank(), size(), 1, 0, rows, rows, strategy().all_reduce)
        with this_rank:
            return global_moments(layer, inputs, mask)

    compute_moments_by(layer, moments)
    layer.supports_jit = False
    return layer
