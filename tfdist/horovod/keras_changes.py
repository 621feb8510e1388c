"""Two places of Keras that have to know of an exchange over ranks, changed for good.

Both concern only models with a `DistributedOptimizer`. A `LossScaleOptimizer` is put around it by
`model.compile`, past us, and decides by the gradients of its own rank whether to apply a step: the
other ranks would wait for it in the exchange. And XLA, which `jit_compile="auto"` turns on for
GPUs, has no operations of Horovod.
"""

from __future__ import annotations

import functools

import keras
import tensorflow as tf

from tfdist.horovod.exchange import exchanges_of
from tfdist.upstream.keras_model import refuse_xla
from tfdist.upstream.patching import replace

_is_finite = keras.optimizers.LossScaleOptimizer.check_finite


@functools.cache
def make() -> None:
    """Makes the changes; once a process."""
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _is_finite_on_all)
    refuse_xla(_is_exchanging)


def _is_finite_on_all(self: keras.optimizers.LossScaleOptimizer, grads: list) -> tf.Tensor:
    exchanges = exchanges_of(self)
    if not exchanges:
        return _is_finite(self, grads)
    for exchange in exchanges:
        exchange.loss_scale = self.dynamic_scale
    return exchanges[0].are_finite(grads)


def _is_exchanging(model: keras.Model) -> bool:
    optimizer = getattr(model, "optimizer", None)
    return optimizer is not None and bool(exchanges_of(optimizer))
