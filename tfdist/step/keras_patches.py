"""The patches of Keras under which replicas are traced, so that Keras sees one device.

Keras divides losses by the number of replicas and takes BatchNorm's moments from one replica's
batch. Here both are done for the global batch instead, in `loss.py` and `batch_norm.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import keras

from tfdist.step import batch_norm
from tfdist.step.random import draws_of_one_device
from tfdist.step.remat import layers_rematerialized
from tfdist.step.scope import layer_inputs_noted
from tfdist.upstream.keras_losses import losses_of_one_device
from tfdist.upstream.keras_model import moments_taken_by
from tfdist.upstream.keras_variables import is_joined_to_read


@contextmanager
def keras_patched(
    model: keras.Model, sync_batch_norm: bool, remat: str = "none", replica_random: bool = False
) -> Iterator[None]:
    """Returns a context to trace replicas in; entered once, outside of all replicas.

    Args:
        model: Its layers are patched.
        sync_batch_norm: Whether all BatchNorm layers use global moments. A layer made with
            `synchronized=True` always does.
        remat: The layers to rematerialize, as in `Trainer(remat=...)`.
        replica_random: Whether each replica draws its own random numbers.
    """
    with ExitStack() as stack:
        if not replica_random:
            stack.enter_context(draws_of_one_device())
        stack.enter_context(losses_of_one_device())
        if any(map(is_joined_to_read, model.variables)):
            stack.enter_context(layer_inputs_noted())
        stack.enter_context(layers_rematerialized(model, remat, sync_batch_norm))
        for layer in batch_norm.layers_of(model):
            is_global = sync_batch_norm or layer.synchronized
            moments = batch_norm.global_moments if is_global else batch_norm.local_moments
            stack.enter_context(moments_taken_by(layer, functools.partial(moments, layer)))
        yield
