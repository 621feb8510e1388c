"""Keras as it has to be while replicas are traced: it sees one device.

Keras divides losses by the number of replicas on its own account, and takes BatchNorm's moments
from one share. Both are done elsewhere here, in one place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import keras

from tfdist.step import batch_norm
from tfdist.step.parameter_gather import layer_inputs_noted
from tfdist.step.remat import computed_again
from tfdist.upstream.keras_losses import losses_of_one_device
from tfdist.upstream.keras_model import moments_taken_by


@contextmanager
def keras_patched(
    model: keras.Model, sync_batch_norm: bool, recompute: str = "none"
) -> Iterator[None]:
    """Traces replicas inside; entered outside of them, since they are traced in turns.

    Args:
        model: Whose BatchNorm layers are meant.
        sync_batch_norm: Whether all of them take global moments; a layer made with
            `synchronized=True` always does.
        recompute: Which layers are computed again on the way back, as of `Trainer`.
    """
    with ExitStack() as stack:
        stack.enter_context(losses_of_one_device())
        stack.enter_context(layer_inputs_noted(model))
        stack.enter_context(computed_again(model, recompute, sync_batch_norm))
        for layer in batch_norm.layers_of(model):
            whole = sync_batch_norm or layer.synchronized
            moments = batch_norm.global_moments if whole else batch_norm.share_moments
            stack.enter_context(moments_taken_by(layer, functools.partial(moments, layer)))
        yield
