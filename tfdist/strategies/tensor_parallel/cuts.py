"""Which variables of a layer are cut along which axis, for each way of splitting it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import layers

from tfdist.strategies.sharded.division import sizes
from tfdist.strategies.tensor_parallel import equation
from tfdist.strategies.tensor_parallel.division import AlongAxis
from tfdist.strategies.tensor_parallel.split import Cut, Split
from tfdist.upstream.keras_layers import (
    dropout_of,
    has_one_axis,
    into_heads,
    is_plain,
    kernel_of,
    out_of_heads,
)

CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
DEPTHWISE = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
ATTENTIONS = (layers.MultiHeadAttention, layers.GroupQueryAttention)
#: Classes derived from these may compute anything.
SUPPORTED = (
    layers.Dense,
    layers.EinsumDense,
    layers.Embedding,
    *CONVOLUTIONS,
    *TRANSPOSED,
    *DEPTHWISE,
    *ATTENTIONS,
)


def ways(layer: keras.layers.Layer, num_devices: int) -> list[Split]:
    """Returns the ways in which a layer can be split, the best first; none: it stays whole.

    A part without elements ends the process in oneDNN: no axis is shorter than the devices.

    Args:
        layer: Built.
        num_devices: Of the parts.
    """
    if type(layer) not in SUPPORTED or not layer.built or not is_plain(layer):
        return []
    found: Sequence[Split | None]
    if isinstance(layer, ATTENTIONS):
        found = [_heads(layer, num_devices)]
    elif isinstance(layer, layers.EinsumDense):
        found = _einsum(layer, num_devices)
    elif isinstance(layer, DEPTHWISE):
        found = [_depthwise(layer, num_devices)]
    elif getattr(layer, "groups", 1) > 1:
        found = [_groups(layer, num_devices)]
    else:
        found = _affine(layer, num_devices)
    return [way for way in found if way is not None and _has_elements(way)]


def _affine(layer: Any, num_devices: int) -> list[Split]:
    """Dense, convolutions and tables, whose kernels are (..., inputs, outputs), or turned."""
    kernel, channels = kernel_of(layer), _channel_axis(layer)
    last = len(kernel.shape) - 1
    of_outputs, of_inputs = (last - 1, last) if isinstance(layer, TRANSPOSED) else (last, last - 1)
    outputs = sizes(kernel.shape[of_outputs], num_devices)
    column = Split(
        layer,
        "column",
        [Cut(kernel, AlongAxis(of_outputs, outputs)), *_bias(layer, 0, outputs)],
        outputs=AlongAxis(channels, outputs),
    )
    if isinstance(layer, layers.Embedding):
        rows = AlongAxis(0, sizes(kernel.shape[0], num_devices))
        return [column, Split(layer, "vocabulary", [Cut(kernel, rows)])]
    inputs = sizes(kernel.shape[of_inputs], num_devices)
    cut = Cut(kernel, AlongAxis(of_inputs, inputs))
    return [column, Split(layer, "row", [cut], inputs=AlongAxis(channels, inputs))]


def _groups(layer: Any, num_devices: int) -> Split | None:
    """A group a device, as in AlexNet: what remains of each is a convolution without groups."""
    if layer.groups != num_devices:
        return None
    kernel = kernel_of(layer)
    outputs = [layer.filters // num_devices] * num_devices
    inputs = [kernel.shape[-2]] * num_devices
    return _channels(layer, AlongAxis(len(kernel.shape) - 1, outputs), inputs, outputs)


def _depthwise(layer: Any, num_devices: int) -> Split:
    kernel = kernel_of(layer)
    inputs = sizes(kernel.shape[-2], num_devices)
    outputs = [layer.depth_multiplier * size for size in inputs]
    return _channels(layer, AlongAxis(len(kernel.shape) - 2, inputs), inputs, outputs)


def _channels(
    layer: Any, of_kernel: AlongAxis, inputs: Sequence[int], outputs: Sequence[int]
) -> Split:
    """A device computes its outputs from its own inputs, by its part of the kernel."""
    channels = _channel_axis(layer)
    return Split(
        layer,
        "channels",
        [Cut(kernel_of(layer), of_kernel), *_bias(layer, 0, outputs)],
        inputs=AlongAxis(channels, inputs),
        outputs=AlongAxis(channels, outputs),
    )


def _einsum(layer: Any, num_devices: int) -> list[Split]:
    kernel, found = kernel_of(layer), []
    axis = equation.output_axis(layer.equation, layer.bias_axes, kernel.shape)
    if axis is not None:
        own = sizes(kernel.shape[axis.of_kernel], num_devices)
        cuts = [Cut(kernel, AlongAxis(axis.of_kernel, own))]
        if axis.of_bias is not None:
            cuts += _bias(layer, axis.of_bias, own)
        found.append(Split(layer, "column", cuts, outputs=AlongAxis(axis.of_tensor, own)))
    axis = equation.input_axis(layer.equation, kernel.shape)
    if axis is not None:
        own = sizes(kernel.shape[axis.of_kernel], num_devices)
        cuts = [Cut(kernel, AlongAxis(axis.of_kernel, own))]
        found.append(Split(layer, "row", cuts, inputs=AlongAxis(axis.of_tensor, own)))
    return found


def _heads(layer: Any, num_devices: int) -> Split | None:
    """Heads of queries, keys and values; the layer behind them takes its rows.

    Not where attention is dropped, which would draw other numbers, or where what each projection
    makes is penalised.
    """
    if dropout_of(layer) or layer.activity_regularizer or not has_one_axis(layer):
        return None
    projections, out = into_heads(layer), out_of_heads(layer)
    if not all(is_plain(projection) for projection in [*projections, out]):
        return None
    fewest = min(kernel_of(projection).shape[1] for projection in projections)
    own = sizes(fewest, num_devices)
    cuts: list[Cut] = []
    for projection in projections:
        # Of grouped queries several go with one head of keys and values.
        heads = [kernel_of(projection).shape[1] // fewest * size for size in own]
        cuts += [Cut(kernel_of(projection), AlongAxis(1, heads)), *_bias(projection, 0, heads)]
    queries = cuts[0].division.sizes
    return Split(layer, "heads", [*cuts, Cut(kernel_of(out), AlongAxis(0, queries))])


def _bias(layer: Any, axis: int, own: Sequence[int]) -> list[Cut]:
    bias = getattr(layer, "bias", None)
    return [] if bias is None else [Cut(bias, AlongAxis(axis, own))]


def _channel_axis(layer: Any) -> int:
    return 1 if getattr(layer, "data_format", None) == "channels_first" else -1


def _has_elements(way: Split) -> bool:
    return all(math.prod(cut.division.sizes) for cut in way.cuts)
