"""The patches of Keras and TensorFlow under which replicas are traced, in one list.

Some belong to the contract: without them, Keras would divide losses by the number of replicas, or
take BatchNorm's moments from one replica's batch. The others change speed and memory only, and
`TFDIST_FAST=0` turns them off. Each context's docstring says what Keras does, and why not here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import keras

from tfdist.patches import batch_norm
from tfdist.patches.attention import attention_in_chunks
from tfdist.patches.random import draws_of_one_device
from tfdist.patches.remat import layers_rematerialized
from tfdist.patches.sizes_on_host import has_gpus
from tfdist.replica.replica import StepOptions
from tfdist.replica.scope import layer_inputs_noted
from tfdist.upstream.keras_gradients import gradients_in_closed_form
from tfdist.upstream.keras_losses import losses_of_one_device
from tfdist.upstream.keras_model import called_by, moments_computed_by, signs_on_device
from tfdist.upstream.keras_variables import is_joined_to_read
from tfdist.upstream.tensorflow_calls import functions_inlined
from tfdist.upstream.tensorflow_random import dropout_drawn_when_reached
from tfdist.upstream.tensorflow_runtime import (
    gradients_of_biases_as_products,
    sizes_of_reductions_on,
)

#: `TFDIST_FAST=0` runs the contract without the patches that only change speed.
_FAST = "TFDIST_FAST"


@dataclass(frozen=True)
class Patch:
    """What replaces functions of Keras or TensorFlow while replicas are traced.

    Attributes:
        name: What is replaced.
        is_exact: Whether the contract needs it. Without the others, results match within rounding.
        context: Returns the context in which the replacement holds.
        applies: Whether a model's step with these options needs it.
    """

    name: str
    is_exact: bool
    context: Callable[[keras.Model, StepOptions], AbstractContextManager[None]]
    applies: Callable[[keras.Model, StepOptions], bool] = lambda model, options: True


@contextmanager
def _moments(model: keras.Model, options: StepOptions) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in batch_norm.layers_of(model):
            is_global = options.sync_batch_norm or layer.synchronized
            moments = batch_norm.global_moments if is_global else batch_norm.local_moments
            stack.enter_context(moments_computed_by(layer, functools.partial(moments, layer)))
        yield


@contextmanager
def _fused_batch_norm(model: keras.Model, options: StepOptions) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in batch_norm.layers_of(model):
            if not (options.sync_batch_norm or layer.synchronized) and batch_norm.is_fusible(layer):
                fused = functools.partial(batch_norm.fused, layer)
                stack.enter_context(called_by(layer, fused))
        yield


#: All patches, in the order in which they are entered.
PATCHES = (
    Patch("order of dropout", False, lambda *_: dropout_drawn_when_reached()),
    Patch(
        "rows of random numbers",
        True,
        lambda *_: draws_of_one_device(),
        lambda _, options: not options.replica_random,
    ),
    Patch("losses divided by replicas", True, lambda *_: losses_of_one_device()),
    Patch("functions of user code", True, lambda *_: functions_inlined()),
    Patch("signs in argmax", False, lambda *_: signs_on_device()),
    Patch("attention of long sequences", False, lambda *_: attention_in_chunks()),
    Patch("gradients of norms and GELU", False, lambda *_: gradients_in_closed_form()),
    Patch(
        "gradients of biases",
        False,
        lambda *_: gradients_of_biases_as_products(),
        lambda model, _: has_gpus() and not model.jit_compile,  # XLA has no such kernel
    ),
    Patch(
        "sizes in gradients of reductions",
        False,
        lambda *_: sizes_of_reductions_on("CPU:0"),
        lambda model, _: has_gpus() and not model.jit_compile,
    ),
    Patch(
        "inputs of layers with sharded weights",
        True,
        lambda *_: layer_inputs_noted(),
        lambda model, _: any(map(is_joined_to_read, model.variables)),
    ),
    Patch(
        "remat",
        True,
        lambda model, options: layers_rematerialized(model, options.remat, options.sync_batch_norm),
    ),
    Patch("moments of BatchNorm", True, _moments),
    Patch("kernel of BatchNorm", False, _fused_batch_norm),
)


@contextmanager
def keras_patched(model: keras.Model, options: StepOptions) -> Iterator[None]:
    """Returns a context to trace replicas in; entered once, outside of all replicas.

    Args:
        model: Its layers are patched.
        options: The options of the step. A BatchNorm layer made with `synchronized=True` uses
            global moments without `sync_batch_norm`, too.
    """
    with ExitStack() as stack:
        for patch in PATCHES:
            if (patch.is_exact or os.environ.get(_FAST) != "0") and patch.applies(model, options):
                stack.enter_context(patch.context(model, options))
        yield


def patched_for_outputs() -> AbstractContextManager[None]:
    """Returns a context to trace predictions in that draw no numbers."""
    return attention_in_chunks() if os.environ.get(_FAST) != "0" else nullcontext()
