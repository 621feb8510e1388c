"""Keras as it has to be while replicas are traced: it sees one device.

Keras divides losses by the number of replicas on its own account, takes BatchNorm's moments from
one share, and exchanges inside the optimizer. All three are done elsewhere here, in one place, so
these functions of Keras are replaced while a step is traced, and put back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdist.step import batch_norm
from tfdist.upstream.patching import replaced


@contextmanager
def keras_on_shares(model: keras.Model, sync_batch_norm: bool) -> Iterator[None]:
    """Traces replicas inside; entered outside of them, since they are traced in turns.

    Args:
        model: Whose BatchNorm layers are meant.
        sync_batch_norm: Whether all of them take global moments; a layer made with
            `synchronized=True` always does.
    """
    with ExitStack() as stack:
        for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
            stack.enter_context(replaced(keras_loss, name, lambda value: value))
        for layer in batch_norm.layers_of(model):
            whole = sync_batch_norm or layer.synchronized
            moments = batch_norm.global_moments if whole else batch_norm.share_moments
            bound = functools.partial(moments, layer)
            stack.enter_context(replaced(layer, "_moments", bound))
        yield


@contextmanager
def as_on_one_device() -> Iterator[None]:
    """Lets a Keras optimizer change one copy of the variables, by gradients already summed.

    Inside `Strategy.update` every assignment is local. So what Keras does for `tf.distribute`
    (all-reduce, merge calls) gives way to its plain methods; clipping, weight decay, EMA,
    constraints and counters are Keras's own.
    """

    def update_each(self: Any, gradients: list, variables: list, learning_rate: Any) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            # Where it is: a server sends none of the moments that an update needs.
            with tf.device(variable.value.device):
                self.update_step(gradient, variable.value, learning_rate)

    plain = {"_backend_update_step": update_each} | {
        name: getattr(BaseOptimizer, name)
        for name in (
            "_apply_weight_decay",
            "_overwrite_model_variables_with_average_value",
            "_backend_increment_gradient_accumulators",
        )
    }
    with ExitStack() as stack:
        # On the class: optimizers such as Nadam override these and call their parent's.
        for name, function in plain.items():
            stack.enter_context(replaced(TFOptimizer, name, function))
        yield
