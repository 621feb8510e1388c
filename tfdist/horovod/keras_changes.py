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
from keras.src.trainers import trainer

from tfdist.horovod.exchange import exchanges_of

_supports_jit = trainer.model_supports_jit
_is_finite = keras.optimizers.LossScaleOptimizer.check_finite


@functools.cache
def make() -> None:
    """Makes the changes; once a process."""
    keras.optimizers.LossScaleOptimizer.check_finite = _is_finite_on_all
    trainer.model_supports_jit = _supports_jit_alone


def _is_finite_on_all(self: keras.optimizers.LossScaleOptimizer, grads: list) -> tf.Tensor:
    exchanges = exchanges_of(self)
    if not exchanges:
        return _is_finite(self, grads)
    for exchange in exchanges:
        exchange.loss_scale = self.dynamic_scale
    return exchanges[0].are_finite(grads)


def _supports_jit_alone(model: keras.Model) -> bool:
    optimizer = getattr(model, "optimizer", None)
    return _supports_jit(model) and not (optimizer is not None and exchanges_of(optimizer))
