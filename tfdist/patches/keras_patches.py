"""The patches of Keras under which replicas are traced, so that Keras sees one device.

Keras divides losses by the number of replicas and takes BatchNorm's moments from one replica's
batch. Here both are done for the global batch instead, in `loss.py` and `batch_norm.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import keras

from tfdist.patches import batch_norm
from tfdist.patches.random import draws_of_one_device
from tfdist.patches.remat import layers_rematerialized
from tfdist.patches.sizes_on_host import has_gpus
from tfdist.replica.options import StepOptions
from tfdist.replica.scope import layer_inputs_noted
from tfdist.upstream.keras_gradients import gradients_in_closed_form
from tfdist.upstream.keras_losses import losses_of_one_device
from tfdist.upstream.keras_model import called_by, moments_computed_by, signs_on_device
from tfdist.upstream.keras_variables import is_joined_to_read
from tfdist.upstream.tensorflow_calls import functions_inlined
from tfdist.upstream.tensorflow_kernels import gradients_of_biases_as_sums, sizes_of_reductions_on
from tfdist.upstream.tensorflow_random import dropout_drawn_when_reached


@contextmanager
def keras_patched(model: keras.Model, options: StepOptions) -> Iterator[None]:
    """Returns a context to trace replicas in; entered once, outside of all replicas.

    Args:
        model: Its layers are patched.
        options: The options of the step. A BatchNorm layer made with `synchronized=True` uses
            global moments without `sync_batch_norm`, too.
    """
    with ExitStack() as stack:
        stack.enter_context(dropout_drawn_when_reached())
        if not options.replica_random:
            stack.enter_context(draws_of_one_device())
        stack.enter_context(losses_of_one_device())
        stack.enter_context(functions_inlined())
        stack.enter_context(signs_on_device())
        stack.enter_context(gradients_in_closed_form())
        if has_gpus():
            stack.enter_context(gradients_of_biases_as_sums())
            if not model.jit_compile:
                stack.enter_context(sizes_of_reductions_on("CPU:0"))
        if any(map(is_joined_to_read, model.variables)):
            stack.enter_context(layer_inputs_noted())
        stack.enter_context(layers_rematerialized(model, options.remat, options.sync_batch_norm))
        for layer in batch_norm.layers_of(model):
            is_global = options.sync_batch_norm or layer.synchronized
            moments = batch_norm.global_moments if is_global else batch_norm.local_moments
            stack.enter_context(moments_computed_by(layer, functools.partial(moments, layer)))
            if not is_global and batch_norm.is_fusible(layer):
                fused = functools.partial(batch_norm.fused, layer)
                stack.enter_context(called_by(layer, fused))
        yield
