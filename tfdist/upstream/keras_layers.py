"""Private names of Keras's layers: their kernels, their calls, and their rematerialization."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.remat import RematMode
from keras.src.backend.tensorflow import core
from keras.src.models.functional import Functional

from tfdist.upstream.keras_model import flatten_layers
from tfdist.upstream.patching import replace, replaced

_plain_conv = backend.nn.conv


def kernel_of(layer: keras.layers.Layer) -> keras.Variable:
    """Returns the variable behind a layer's kernel: `_kernel`, or `_embeddings` of an Embedding.

    The public `kernel` and `embeddings` may be tensors that were computed from it.
    """
    if isinstance(layer, keras.layers.Embedding):
        return layer._embeddings
    return layer._kernel if "_kernel" in vars(layer) else layer.kernel


def is_plain(layer: keras.layers.Layer) -> bool:
    """Whether a layer's kernel is one variable as it was made: no `lora_enabled`, no quantizing."""
    return not getattr(layer, "lora_enabled", False) and layer.quantization_mode is None


def into_heads(attention: keras.layers.Layer) -> list[keras.layers.EinsumDense]:
    """Returns the layers that project to the heads: `_query_dense`, and `_key_dense` and so on."""
    layers = [attention._query_dense, attention._key_dense, attention._value_dense]
    gate = getattr(attention, "_gate_dense", None)
    return layers if gate is None else [*layers, gate]


def out_of_heads(attention: keras.layers.Layer) -> keras.layers.EinsumDense:
    """Returns the layer that makes one of all heads: `_output_dense`."""
    return attention._output_dense


def layout_map_of(distribution: Any) -> keras.distribution.LayoutMap:
    """Returns the layout map of a `keras.distribution.ModelParallel`: its `_layout_map`."""
    return distribution._layout_map


def has_one_axis(attention: keras.layers.Layer) -> bool:
    """Whether an attention is over one axis: `MultiHeadAttention._attention_axes`."""
    return len(getattr(attention, "_attention_axes", None) or (1,)) == 1


def dropout_of(attention: keras.layers.Layer) -> float:
    """Returns the share of attention that is dropped: `MultiHeadAttention._dropout`."""
    grouped = isinstance(attention, keras.layers.GroupQueryAttention)
    return attention.dropout if grouped else attention._dropout


def kernels_read_outside_of_xla() -> AbstractContextManager[None]:
    """Returns a context in which `keras.src.backend.nn.conv` reads kernels before it calls XLA.

    On CPUs, Keras compiles grouped convolutions with XLA wherever they are called. XLA would read
    the kernel itself, and cannot read one that is on another device.
    """
    return replaced(backend.nn, "conv", _conv)


def read_own_kernels_outside_of_xla(model: keras.Model) -> None:
    """Lets a model's grouped convolutions do the same wherever they are called."""
    for layer in flatten_layers(model):
        if getattr(layer, "groups", 1) > 1 and hasattr(layer, "convolution_op"):
            replace(layer, "convolution_op", functools.partial(_convolution_op, layer))


def _convolution_op(layer: Any, inputs: Any, kernel: Any) -> Any:
    return type(layer).convolution_op(layer, inputs, tf.convert_to_tensor(kernel))


def _conv(inputs: Any, kernel: Any, *args: Any, **options: Any) -> Any:
    return _plain_conv(inputs, tf.convert_to_tensor(kernel), *args, **options)


def operations_called_by(model: keras.Model) -> list[keras.Operation] | None:
    """Returns what a model calls, in order; a layer that is called twice is there twice.

    Of `Functional._nodes_by_depth`, in whose order a model calls its operations; a `Sequential` has
    one in `_functional`. There is no public way to ask for calls, only for layers.

    Returns:
        None where it is not Keras that calls them, or nothing is known yet.
    """
    graph = model
    if isinstance(model, keras.Sequential):
        if type(model).call is not keras.Sequential.call:
            return None
        graph = model._functional
    if not isinstance(graph, Functional) or type(graph).call is not Functional.call:
        return None
    by_depth = graph._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node.operation for node in nodes if node.operation is not None and not node.is_input]


@contextmanager
def operations_called_through(function: Callable[..., Any]) -> Iterator[None]:
    """Calls `function(call, operation, *args, **kwargs)` for each call of an operation or layer.

    Args:
        function: Has to call `call(operation, *args, **kwargs)`, Keras's own method, sooner or
            later; for a layer it is called twice, by `keras.Operation` and by `keras.Layer`.
    """
    with ExitStack() as stack:
        for owner in (keras.Operation, keras.layers.Layer):
            through = functools.partialmethod(_through, function, owner.__call__)
            stack.enter_context(replaced(owner, "__call__", through))
        yield


def _through(
    operation: Any, function: Callable[..., Any], call: Any, *args: Any, **kwargs: Any
) -> Any:
    return function(call, operation, *args, **kwargs)


def asks_for_remat(operation: keras.Operation) -> bool:
    """Whether an operation was made in a `keras.RematScope`, as `Operation._remat_mode` says."""
    mode = getattr(operation, "_remat_mode", None)
    return mode is not None and mode.mode is not None


def asking_for_remat(layer: keras.layers.Layer, does: bool = True) -> AbstractContextManager[None]:
    """Returns a context in which a layer's call is handed to `keras.remat`, or is not."""
    return replaced(layer, "_remat_mode", RematMode("full", 0, []) if does else None)


def copy_remat(layer: keras.Operation, from_layer: keras.Operation) -> None:
    """Lets a layer ask for what another does: no configuration holds `_remat_mode`."""
    replace(layer, "_remat_mode", getattr(from_layer, "_remat_mode", None))


def remat_replaced_by(
    function: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> AbstractContextManager[None]:
    """Returns a context in which `function` is `keras.remat`: `remat` of the backend's `core`.

    Keras's own refuses keyword arguments in a graph, draws other random numbers the second time,
    and loses gradients of what a `StatelessScope` holds, and of losses that layers add.
    """
    return replaced(core, "remat", function)


def call_context() -> Callable[[], AbstractContextManager[None]]:
    """Returns what makes a context in which calls of layers find what they would find here.

    In what format variables are read and whether it is a training: `get_global_attribute` of
    `autocast_scope` and `current_call_ctx`.
    """
    names = ("autocast_scope", "current_call_ctx")
    here = {name: global_state.get_global_attribute(name) for name in names}

    @contextmanager
    def there() -> Iterator[None]:
        before = {name: global_state.get_global_attribute(name) for name in names}
        _set_global(here)
        try:
            yield
        finally:
            _set_global(before)

    return there


def _set_global(values: dict[str, Any]) -> None:
    for name, value in values.items():
        global_state.set_global_attribute(name, value)
