"""Two permanent patches of Keras for models with a `DistributedOptimizer`.

`model.compile` may wrap the optimizer in a `LossScaleOptimizer`, which decides from the gradients
of its own rank whether to apply a step: ranks that apply it would wait in the all-reduce for one
that does not. XLA, which `jit_compile="auto"` enables on GPUs, cannot compile Horovod's operations.
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
    """Applies the patches, once per process."""
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
