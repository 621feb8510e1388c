"""Private names of Keras's layers: their kernels, their calls, and their rematerialization."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import core
from keras.src.ops import nn as nn_ops
from keras.src.ops import numpy as numpy_ops

from tfdist.upstream.features import HAS_REMAT
from tfdist.upstream.keras_model import flatten_layers, functional_graph, is_assigned
from tfdist.upstream.patching import replace, replaced

if HAS_REMAT:
    from keras.src.backend.common import remat

_plain_conv = backend.nn.conv
#: What `x + y` and `keras.ops` become in a functional model, if it computes each element by itself.
_ELEMENTWISE = (
    numpy_ops.Add, numpy_ops.Subtract, numpy_ops.Multiply, numpy_ops.Maximum, numpy_ops.Minimum,
    nn_ops.Relu, nn_ops.Gelu, nn_ops.Silu,
)  # fmt: skip
#: The attributes of attention layers with the rate of their dropout.
_DROPOUT_OF_ATTENTION = {
    keras.layers.MultiHeadAttention: "_dropout",
    keras.layers.GroupQueryAttention: "dropout",
}
#: KerasHub's layers that compute attention without `keras.ops.dot_product_attention`. Each query's
#: result depends on its own row of the mask, and on no weight.
_KERAS_HUB_ATTENTION = {
    "CachedGemmaAttention", "CachedGemma3Attention", "CachedMistralAttention", "Phi3Attention",
    "CachedMixtralAttention", "Gemma4TextAttention", "GPTNeoXAttention", "LlamaAttention",
    "QwenAttention", "QwenMoeAttention", "Qwen3Attention", "Qwen3MoeAttention", "Qwen3_5Attention",
    "SmolLM3Attention",
}  # fmt: skip
#: Methods that compute a mask of queries and keys, of Keras's attention and KerasHub's decoders.
_MASKS = {"_compute_attention_mask", "_compute_self_attention_mask"}


def row_by_row_functions() -> list[tuple[Any, str]]:
    """Returns what `keras.ops.ctc_loss` and `ctc_decode` call, by module and name."""
    return [(backend.nn, "ctc_loss"), (backend.nn, "ctc_decode")]


def kernel_of(layer: keras.layers.Layer) -> keras.Variable:
    """Returns the variable of a layer's kernel: `_kernel`, or `_embeddings` of an Embedding.

    The public `kernel` and `embeddings` may be tensors that are computed from it.
    """
    if isinstance(layer, keras.layers.Embedding):
        return layer._embeddings
    return layer._kernel if "_kernel" in vars(layer) else layer.kernel


def is_unquantized(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer's kernel is not quantized, and its `call` is that of its class."""
    return layer.quantization_mode is None and not is_assigned(layer, "call")


def lora_factors(layer: keras.layers.Layer) -> tuple[keras.Variable, keras.Variable] | None:
    """Returns the two matrices that LoRA adds to a kernel, or None: `lora_kernel_a` and `_b`.

    The first has the kernel's axes but for the last, the second has the last one.
    """
    if not getattr(layer, "lora_enabled", False):
        return None
    name = "embeddings" if isinstance(layer, keras.layers.Embedding) else "kernel"
    return getattr(layer, f"lora_{name}_a"), getattr(layer, f"lora_{name}_b")


def into_heads(attention: keras.layers.Layer) -> list[keras.layers.EinsumDense]:
    """Returns the projections to the heads: `_query_dense`, `_key_dense`, `_value_dense`."""
    layers = [attention._query_dense, attention._key_dense, attention._value_dense]
    gate = getattr(attention, "_gate_dense", None)
    return layers if gate is None else [*layers, gate]


def out_of_heads(attention: keras.layers.Layer) -> keras.layers.EinsumDense:
    """Returns the layer that combines the heads: `_output_dense`."""
    return attention._output_dense


def is_elementwise_operation(operation: keras.Operation) -> bool:
    """Returns whether an operation is such as `x + y` or `keras.ops.relu`: `keras.src.ops`."""
    return type(operation) in _ELEMENTWISE


def layout_map_of(distribution: Any) -> keras.distribution.LayoutMap:
    """Returns the layout map of a `keras.distribution.ModelParallel`: its `_layout_map`."""
    return distribution._layout_map


def attention_axes(layer: keras.layers.Layer) -> tuple[int, ...]:
    """Returns the axes over which a layer attends, if it is known to: its `_attention_axes`."""
    return tuple(getattr(layer, "_attention_axes", None) or ())


def dropout_of(attention: keras.layers.Layer) -> keras.layers.Dropout:
    """Returns the dropout of the attention weights: `MultiHeadAttention._dropout_layer`."""
    return attention._dropout_layer


def kernels_read_outside_of_xla() -> AbstractContextManager[None]:
    """Returns a context in which `keras.src.backend.nn.conv` reads kernels before it calls XLA.

    On CPUs, Keras always compiles grouped convolutions with XLA, which cannot read a kernel
    variable on another device.
    """
    return replaced(backend.nn, "conv", _conv)


def read_own_kernels_outside_of_xla(model: keras.Model) -> None:
    """Makes a model's grouped convolutions do the same permanently."""
    for layer in flatten_layers(model):
        if getattr(layer, "groups", 1) > 1 and hasattr(layer, "convolution_op"):
            replace(layer, "convolution_op", functools.partial(_convolution_op, layer))


def _convolution_op(layer: Any, inputs: Any, kernel: Any) -> Any:
    return type(layer).convolution_op(layer, inputs, tf.convert_to_tensor(kernel))


def _conv(inputs: Any, kernel: Any, *args: Any, **options: Any) -> Any:
    return _plain_conv(inputs, tf.convert_to_tensor(kernel), *args, **options)


def operations_called_by(model: keras.Model) -> list[keras.Operation] | None:
    """Returns the operations that a model calls, in order, repeated if called repeatedly.

    From `Functional._nodes_by_depth`, whose order is that of the calls. The public API lists
    layers, but not calls.

    Returns:
        None for a subclassed model, or if the model is not built.
    """
    graph = functional_graph(model)
    if graph is None:
        return None
    by_depth = graph._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node.operation for node in nodes if node.operation is not None and not node.is_input]


@contextmanager
def operations_called_through(function: Callable[..., Any]) -> Iterator[None]:
    """Calls `function(call, operation, *args, **kwargs)` for each call of an operation or layer.

    Args:
        function: Has to call `call(operation, *args, **kwargs)`, Keras's own method. For a layer it
            is called twice, for `keras.Operation` and for `keras.Layer`.
    """

    def through(operation: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(call, operation, *args, **kwargs)

    with ExitStack() as stack:
        for owner in (keras.Operation, keras.layers.Layer):
            new = functools.partialmethod(through, owner.__call__)
            stack.enter_context(replaced(owner, "__call__", new))
        yield


def learned_weights(operation: keras.Operation) -> list[keras.Variable]:
    """Returns the weights of a layer that were created as trainable, or by quantization.

    `Layer._trainable_variables`, whether or not the layer is frozen. Its other variables are state,
    which calls may update.
    """
    if not isinstance(operation, keras.layers.Layer):
        return []
    learned = [v for layer in flatten_layers(operation) for v in layer._trainable_variables]
    return learned + frozen_weights(operation)


def frozen_weights(model: keras.layers.Layer) -> list[keras.Variable]:
    """Returns the weights that are not trained and that no call of a layer changes.

    These are weights that were frozen, and those of quantized layers: `_trainable_variables` and
    `_non_trainable_variables`.
    """
    weights: dict[int, keras.Variable] = {}
    for layer in flatten_layers(model):
        variables = list(layer._trainable_variables)
        if getattr(layer, "quantization_mode", None) is not None:
            variables += layer._non_trainable_variables
        frozen = (v for v in variables if not v.trainable and not v.overwrite_with_gradient)
        weights |= {id(v): v for v in frozen}
    return list(weights.values())


def is_in_remat_scope(operation: keras.Operation) -> bool:
    """Returns whether an operation was created in a `keras.RematScope`: `Operation._remat_mode`."""
    mode = getattr(operation, "_remat_mode", None)
    return mode is not None and mode.mode is not None


def remat_enabled(layer: keras.layers.Layer, does: bool = True) -> AbstractContextManager[None]:
    """Returns a context that turns `keras.remat` of a layer's calls on or off."""
    return replaced(layer, "_remat_mode", remat.RematMode("full", 0, []) if does else None)


def copy_remat(layer: keras.Operation, from_layer: keras.Operation) -> None:
    """Copies `_remat_mode`, which is not part of a layer's configuration, to another layer."""
    replace(layer, "_remat_mode", getattr(from_layer, "_remat_mode", None))


def copy_changes(layer: keras.layers.Layer, to: keras.layers.Layer) -> None:
    """Freezes a layer, quantizes it, and enables LoRA, as was done to another after construction.

    A configuration of a library's model, unlike Keras's own, does not contain all of this.
    """
    to.trainable = layer.trainable
    mode = getattr(layer, "quantization_mode", None)
    if mode is not None and to.quantization_mode is None:
        config = getattr(layer, "quantization_config", None)
        to.quantize(mode, type_check=False, **({} if config is None else {"config": config}))
    for name, value in vars(layer).items():
        if name == "quantization_config" or name.endswith("quantizer"):
            setattr(to, name, value)  # activations may stay as they are: Int4QuantizationConfig
    if getattr(layer, "lora_enabled", False) and not to.lora_enabled:
        alpha = {"lora_alpha": layer.lora_alpha} if hasattr(layer, "lora_alpha") else {}
        to.enable_lora(layer.lora_rank, **alpha)


def first_of_other_dtype(
    model: keras.Model, copied: keras.Model
) -> tuple[keras.layers.Layer, str] | None:
    """Returns the first layer with variables whose copy has another dtype, and that dtype."""
    for one, other in zip(flatten_layers(model), flatten_layers(copied), strict=True):
        of_one, of_other = one.dtype_policy, other.dtype_policy
        if one.variables and (of_one.compute_dtype, of_one.variable_dtype) != (
            of_other.compute_dtype, of_other.variable_dtype,
        ):  # fmt: skip
            return one, of_other.name
    return None


def variables_by_name(layer: keras.layers.Layer) -> dict[tuple[str, int], keras.Variable]:
    """Returns the variables of a layer itself, with the number of each among those of its name.

    `Layer._trainable_variables`, `_non_trainable_variables`, and `_seed_generators`.
    """
    seeds = [generator.state for generator in layer._seed_generators]
    named: dict[tuple[str, int], keras.Variable] = {}
    for variable in [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]:
        name = variable.name
        named[name, sum(name == other for other, _ in named)] = variable
    return named


@contextmanager
def attention_computed_by(
    function: Callable[..., Any], applies: Callable[[tf.Tensor, tf.Tensor], bool]
) -> Iterator[None]:
    """Computes dot-product attention by `function(plain, query, key, value, ...)`.

    Replaces the backend's `nn.dot_product_attention`. Layers call it if they have no dropout, and
    here also where theirs is not active: `_compute_attention`. For layers of KerasHub that never
    call it, the plain function is their own `_compute_attention`.

    Args:
        function: Has the arguments of `keras.ops.dot_product_attention` after the plain function.
        applies: Whether it computes the attention of a query and a key in its own way.
    """

    def without_dropout(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def compute(layer: Any, query: Any, key: Any, *args: Any, **options: Any) -> Any:
            given = signature.bind(layer, query, key, *args, **options).arguments
            is_inactive = given.get("training") is False and applies(query, key)
            with replaced(layer, name, 0.0) if is_inactive else nullcontext():
                return plain(layer, query, key, *args, **options)

        signature = inspect.signature(plain)
        return compute

    def after_inputs(compute_mask: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any, **options: Any) -> Any:
            # Masks depend on sizes alone: those of all layers would be made when a step starts.
            with tf.control_dependencies([*filter(tf.is_tensor, (*args, *options.values()))]):
                return compute_mask(*args, **options)

        return compute

    modules = [vars(m) for name, m in [*sys.modules.items()] if name.startswith("keras_hub.src")]
    of_keras_hub = {v for module in modules for v in module.values() if inspect.isclass(v)}
    with ExitStack() as stack:
        plain = backend.nn.dot_product_attention
        new = functools.partial(function, plain)
        stack.enter_context(replaced(backend.nn, "dot_product_attention", new))
        for owner, name in _DROPOUT_OF_ATTENTION.items():
            compute = without_dropout(name, owner._compute_attention)
            stack.enter_context(replaced(owner, "_compute_attention", compute))
        for layer in _DROPOUT_OF_ATTENTION.keys() | of_keras_hub:
            for name in _MASKS & vars(layer).keys():
                compute = after_inputs(vars(layer)[name])
                stack.enter_context(replaced(layer, name, compute))
            if layer.__name__ in _KERAS_HUB_ATTENTION:
                compute = _attention_by_rows(vars(layer)["_compute_attention"], function, applies)
                stack.enter_context(replaced(layer, "_compute_attention", compute))
        yield


def _attention_by_rows(
    plain: Callable[..., Any],
    function: Callable[..., Any],
    applies: Callable[[tf.Tensor, tf.Tensor], bool],
) -> Callable[..., Any]:
    """Returns a `_compute_attention` of KerasHub that leaves the choice of rows to `function`."""
    signature = inspect.signature(plain)
    inputs = [*signature.parameters][1:5]  # query, key, value and mask, whatever their names

    def compute(layer: Any, *args: Any, **options: Any) -> Any:
        given = signature.bind(layer, *args, **options)
        given.apply_defaults()
        query, key, value, mask = (given.arguments[name] for name in inputs)
        has_dropout = given.arguments.get("training", False) is not False and layer.dropout
        is_of_rows = mask is None or len(mask.shape) == 3
        if has_dropout or not is_of_rows or not applies(query, key):
            return plain(layer, *args, **options)
        masks = None if mask is None else [mask]
        has_window = getattr(layer, "use_sliding_window_attention", True)
        window = getattr(layer, "sliding_window_size", None) or key.shape[1]
        if masks and has_window and window < key.shape[1]:  # a wider one hides nothing
            masks.append(layer._mask_sliding_window(mask))
        masks = masks and tf.stack([tf.cast(one, "bool") for one in masks], 1)

        def of_rows(query: Any, key: Any, value: Any, _: Any, masks: Any, *__: Any) -> Any:
            rows = [query, key, value, None if masks is None else masks[:, 0]]
            arguments = given.arguments | dict(zip(inputs, rows, strict=True))
            # The window of a chunk of rows is a part of the window of all rows.
            with replaced(layer, "_mask_sliding_window", lambda *_, **__: masks[:, -1]):
                return plain(**arguments)

        return function(of_rows, query, key, value, mask=masks)

    return compute


def remat_replaced_by(
    function: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> AbstractContextManager[None]:
    """Returns a context in which `function` replaces `keras.remat`: the backend's `core.remat`.

    Keras's own function rejects keyword arguments in a graph, draws different random numbers in the
    recomputation, and loses gradients of values in a `StatelessScope` and of added losses.
    """
    return replaced(core, "remat", function) if HAS_REMAT else nullcontext()


def call_context() -> Callable[[], AbstractContextManager[None]]:
    """Captures the context of layer calls of this thread, to enter it elsewhere.

    It holds the autocast dtype and the `training` flag: `get_global_attribute` of `autocast_scope`
    and `current_call_ctx`.

    Returns:
        A function that returns a context manager.
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


def separate_segments(backbone: keras.Model) -> bool:
    """Makes decoder layers of KerasHub read their padding mask as the segments of packed rows.

    A position then attends to its own segment alone: the same number in the mask, 0 is padding.
    Rotary positions are relative, so that each segment gives what it gives alone.

    Returns:
        Whether the backbone has such layers, and no absolute positions.
    """
    layers = flatten_layers(backbone)
    masks = [(x, name) for x in layers for name in _MASKS if hasattr(x, name)]
    masks = [(x, name) for x, name in masks if "cache" in str(inspect.signature(getattr(x, name)))]
    if any("PositionEmbedding" in type(layer).__name__ for layer in layers):
        return False
    for layer, name in masks:
        vars(layer)[name] = _of_own_segment(getattr(layer, name))
    return bool(masks)


def _of_own_segment(compute_mask: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(compute_mask)

    def compute(*args: Any, **options: Any) -> Any:
        mask, given = compute_mask(*args, **options), parameters.bind(*args, **options).arguments
        is_cached = any(v is not None for n, v in given.items() if n.endswith("cache"))
        segments = next((v for n, v in given.items() if n.endswith("padding_mask")), None)
        if is_cached or segments is None:
            return mask
        same = segments[:, :, None] == segments[:, None, :]
        return keras.ops.where(same, mask, keras.ops.zeros_like(mask))

    return compute
