"""Private names of Keras's layers that have kernels."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend

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
