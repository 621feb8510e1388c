"""The ways of splitting a layer over devices: which variables are split, along which axis.

`"column"`: each device computes some of the outputs from all inputs. `"row"`: each computes a term
of all outputs from some of the inputs (Shoeybi et al. 2019, "Megatron-LM", section 3).
`"channels"`: each computes outputs from its own inputs only (the groups of a convolution, as in
AlexNet). `"heads"`: the heads of an attention. `"vocabulary"`: each looks up ids in its rows of a
table, and computes the logits of these ids if the table is reversible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import activations, layers

from tfdist.groups.base import shard_sizes
from tfdist.groups.fusion import copied_slices
from tfdist.upstream.features import existing
from tfdist.upstream.keras_layers import (
    attention_axes,
    into_heads,
    is_unquantized,
    kernel_of,
    lora_factors,
    out_of_heads,
)

CONVOLUTIONS = (layers.Conv1D, layers.Conv2D, layers.Conv3D)
TRANSPOSED = (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)
DEPTHWISE = (layers.DepthwiseConv1D, layers.DepthwiseConv2D)
ATTENTIONS = (layers.MultiHeadAttention, layers.GroupQueryAttention)
REVERSIBLE = existing(layers, "ReversibleEmbedding")  # a class, or none before Keras 3.12
#: Layers that can be split. Subclasses may compute anything, unless they define nothing.
SUPPORTED = (
    layers.Dense,
    layers.EinsumDense,
    layers.Embedding,
    *REVERSIBLE,
    *CONVOLUTIONS,
    *TRANSPOSED,
    *DEPTHWISE,
    *ATTENTIONS,
)

#: Activations of single values. Not `sigmoid`, because losses use its logits.
ELEMENTWISE = (
    activations.linear, activations.relu, activations.relu6, activations.leaky_relu,
    activations.elu, activations.selu, activations.celu, activations.gelu, activations.silu,
    activations.tanh, activations.softplus, activations.softsign, activations.mish,
    activations.hard_sigmoid, activations.exponential,
)  # fmt: skip

_ELEMENTWISE_LAYERS = (layers.ReLU, layers.LeakyReLU, layers.ELU)
#: Layers that treat each channel separately, and may be called on some of the channels.
_BY_CHANNEL = (
    layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D,
    layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D,
    layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D,
)  # fmt: skip


class AlongAxis:
    """Divides a variable into slices along an axis, one per device: see `ShardedVariable`."""

    reads_parts, has_all = True, True

    def __init__(self, axis: int, sizes: Sequence[int]) -> None:
        self.axis, self.sizes = axis, list(sizes)

    def __eq__(self, other: object) -> bool:
        key = (self.axis, self.sizes)
        return isinstance(other, AlongAxis) and key == (other.axis, other.sizes)

    def __hash__(self) -> int:
        return hash((self.axis, *self.sizes))

    def cut(self, whole: tf.Tensor) -> list[tf.Tensor]:
        """Returns all slices."""
        return copied_slices(whole, self.axis, self.sizes)

    def join(self, parts: Sequence[Any], shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
        """Returns the full value, on the device that the caller computes on."""
        whole = tf.concat([tf.convert_to_tensor(part) for part in parts], self.axis)
        return tf.cast(tf.ensure_shape(whole, shape), dtype)

    def agreed(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value: no other process has a slice."""
        return value

    def add_up(self, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the numbers: no other process has a slice."""
        return numbers


class Cut(NamedTuple):
    """A variable, and how it is divided."""

    variable: keras.Variable
    division: AlongAxis


class Split(NamedTuple):
    """How a layer is split.

    Attributes:
        layer: The layer.
        kind: `"column"`, `"row"`, `"channels"`, `"heads"` or `"vocabulary"`.
        cuts: The division of its variables; the first is the kernel's.
        inputs: The division of the inputs; None: each device gets all of them.
        outputs: The division of the outputs; None: they are sums of all devices' terms.
    """

    layer: Any
    kind: str
    cuts: list[Cut]
    inputs: AlongAxis | None = None
    outputs: AlongAxis | None = None


def ways(layer: keras.layers.Layer, num_devices: int) -> list[Split]:
    """Returns the ways in which a layer can be split, the best first; none if it stays whole.

    An axis has at least as many elements as there are devices, because oneDNN ends the process if a
    slice is empty.
    """
    if not _is_supported(type(layer)) or not layer.built or not is_unquantized(layer):
        return []
    splits: Sequence[Split | None]
    if isinstance(layer, ATTENTIONS):
        splits = [_heads(layer, num_devices)]
    elif isinstance(layer, layers.EinsumDense):
        splits = _einsum(layer, num_devices)
    elif lora_factors(layer) and (isinstance(layer, REVERSIBLE) or getattr(layer, "groups", 1) > 1):
        splits = []
    elif isinstance(layer, REVERSIBLE):
        # The vocabulary of a table that also computes logits, by the same weights or others.
        sizes = shard_sizes(layer.input_dim, num_devices)
        cuts = [Cut(kernel_of(layer), AlongAxis(0, sizes))]
        if not layer.tie_weights:
            cuts.append(Cut(layer.reverse_embeddings, AlongAxis(1, sizes)))
        splits = [Split(layer, "vocabulary", cuts, outputs=AlongAxis(-1, sizes))]
    elif isinstance(layer, DEPTHWISE):
        kernel = kernel_of(layer)
        inputs = shard_sizes(kernel.shape[-2], num_devices)
        outputs = [layer.depth_multiplier * size for size in inputs]
        splits = [_channels(layer, AlongAxis(len(kernel.shape) - 2, inputs), inputs, outputs)]
    elif getattr(layer, "groups", 1) > 1:
        splits = []
        if layer.groups == num_devices:  # as in AlexNet: each computes a convolution without groups
            kernel = kernel_of(layer)
            outputs = [layer.filters // num_devices] * num_devices
            inputs = [kernel.shape[-2]] * num_devices
            division = AlongAxis(len(kernel.shape) - 1, outputs)
            splits = [_channels(layer, division, inputs, outputs)]
    else:
        splits = _affine(layer, num_devices)
    present = [way for way in splits if way is not None]
    return [way for way in present if all(math.prod(c.division.sizes) for c in way.cuts)]


def _is_supported(kind: type) -> bool:
    """Returns whether a class is one of `SUPPORTED`, or a subclass of it that defines nothing."""
    while kind not in SUPPORTED:
        defined = [v for v in vars(kind).values() if callable(v) or isinstance(v, property)]
        if defined or len(kind.__bases__) != 1:
            return False
        (kind,) = kind.__bases__
    return True


def _affine(layer: Any, num_devices: int) -> list[Split]:
    """Splits dense layers, convolutions and tables, with kernels of (..., inputs, outputs)."""
    kernel, channels = kernel_of(layer), _channel_axis(layer)
    last = len(kernel.shape) - 1
    of_outputs, of_inputs = (last - 1, last) if isinstance(layer, TRANSPOSED) else (last, last - 1)
    outputs = shard_sizes(kernel.shape[of_outputs], num_devices)
    column = Split(
        layer,
        "column",
        [
            Cut(kernel, AlongAxis(of_outputs, outputs)),
            *_bias(layer, 0, outputs),
            *_lora(layer, of_outputs, outputs),
        ],
        outputs=AlongAxis(channels, outputs),
    )
    if isinstance(layer, layers.Embedding):
        rows = AlongAxis(0, shard_sizes(kernel.shape[0], num_devices))
        by_rows = [] if lora_factors(layer) else [Split(layer, "vocabulary", [Cut(kernel, rows)])]
        return [column, *by_rows]
    inputs = shard_sizes(kernel.shape[of_inputs], num_devices)
    cuts = [Cut(kernel, AlongAxis(of_inputs, inputs)), *_lora(layer, of_inputs, inputs)]
    return [column, Split(layer, "row", cuts, inputs=AlongAxis(channels, inputs))]


def _channels(
    layer: Any, of_kernel: AlongAxis, inputs: Sequence[int], outputs: Sequence[int]
) -> Split:
    """Each device computes its outputs from its own inputs and its slice of the kernel."""
    channels = _channel_axis(layer)
    return Split(
        layer,
        "channels",
        [Cut(kernel_of(layer), of_kernel), *_bias(layer, 0, outputs)],
        inputs=AlongAxis(channels, inputs),
        outputs=AlongAxis(channels, outputs),
    )


def _einsum(layer: Any, num_devices: int) -> list[Split]:
    kernel, splits = kernel_of(layer), []
    axis = output_axis(layer.equation, layer.bias_axes, kernel.shape)
    if axis is not None:
        sizes = shard_sizes(kernel.shape[axis.of_kernel], num_devices)
        cuts = [Cut(kernel, AlongAxis(axis.of_kernel, sizes)), *_lora(layer, axis.of_kernel, sizes)]
        if axis.of_bias is not None:
            cuts += _bias(layer, axis.of_bias, sizes)
        splits.append(Split(layer, "column", cuts, outputs=AlongAxis(axis.of_tensor, sizes)))
    axis = input_axis(layer.equation, kernel.shape)
    if axis is not None:
        sizes = shard_sizes(kernel.shape[axis.of_kernel], num_devices)
        cuts = [Cut(kernel, AlongAxis(axis.of_kernel, sizes)), *_lora(layer, axis.of_kernel, sizes)]
        splits.append(Split(layer, "row", cuts, inputs=AlongAxis(axis.of_tensor, sizes)))
    return splits


def _heads(layer: Any, num_devices: int) -> Split | None:
    """Splits the heads of queries, keys and values, and the rows of the output projection.

    Not with an activity regularizer, which the projections apply to their outputs.
    """
    projections, out = into_heads(layer), out_of_heads(layer)
    if len(attention_axes(layer)) > 1 or not all(map(is_unquantized, [*projections, out])):
        return None
    if any(projection.activity_regularizer for projection in [*projections, out]):
        return None
    fewest = min(kernel_of(projection).shape[1] for projection in projections)
    sizes = shard_sizes(fewest, num_devices)
    cuts: list[Cut] = []
    for projection in projections:
        # With grouped queries, several heads of queries share one head of keys and values.
        heads = [kernel_of(projection).shape[1] // fewest * size for size in sizes]
        cuts += [Cut(kernel_of(projection), AlongAxis(1, heads)), *_bias(projection, 0, heads)]
        cuts += _lora(projection, 1, heads)
    queries = cuts[0].division.sizes
    cuts += [Cut(kernel_of(out), AlongAxis(0, queries)), *_lora(out, 0, queries)]
    return Split(layer, "heads", cuts)


def _bias(layer: Any, axis: int, own: Sequence[int]) -> list[Cut]:
    bias = getattr(layer, "bias", None)
    return [] if bias is None else [Cut(bias, AlongAxis(axis, own))]


def _lora(layer: Any, axis: int, own: Sequence[int]) -> list[Cut]:
    """Divides the matrix of LoRA that has an axis of the kernel; each device has all the other."""
    if (factors := lora_factors(layer)) is None:
        return []
    is_last = axis == len(kernel_of(layer).shape) - 1
    return [Cut(factors[is_last], AlongAxis(1 if is_last else axis, own))]


def _channel_axis(layer: Any) -> int:
    return 1 if getattr(layer, "data_format", None) == "channels_first" else -1


def is_elementwise(layer: keras.Operation) -> bool:
    """Returns whether a layer without weights computes each element independently."""
    if type(layer) is layers.Activation:
        return layer.activation in ELEMENTWISE
    return type(layer) in _ELEMENTWISE_LAYERS


def keeps_parts(layer: keras.Operation) -> bool:
    """Returns whether a layer without weights computes each channel independently."""
    return is_elementwise(layer) or type(layer) in _BY_CHANNEL


# ---- equations of EinsumDense ----


class Axis(NamedTuple):
    """A label of an equation, as an axis of the tensors that have it.

    Attributes:
        of_kernel: The axis of the kernel.
        of_tensor: The axis of the outputs or, if it is summed over, of the inputs; negative after
            an ellipsis.
        of_bias: The axis of the bias; None: the bias does not have it.
    """

    of_kernel: int
    of_tensor: int
    of_bias: int | None


def output_axis(equation: str, bias_axes: str | None, shape: Sequence[int]) -> Axis | None:
    """Returns the longest axis of the kernel that the outputs have and the inputs do not have.

    Args:
        equation: As for `keras.layers.EinsumDense`, for example `"...x,xy->...y"`.
        bias_axes: As for `keras.layers.EinsumDense`.
        shape: The shape of the kernel.
    """
    inputs, kernel, outputs = _specs(equation)
    labels = [label for label in kernel if label in outputs and label not in inputs]
    if not labels:
        return None
    label = max(labels, key=lambda label: shape[kernel.index(label)])
    first = min((outputs.replace("...", "").index(axis) for axis in bias_axes or ""), default=0)
    of_bias = None
    if label in (bias_axes or ""):
        of_bias = outputs.replace("...", "").index(label) - first
    return Axis(kernel.index(label), _place(outputs, label), of_bias)


def input_axis(equation: str, shape: Sequence[int]) -> Axis | None:
    """Returns the longest axis of the kernel that is summed over."""
    inputs, kernel, outputs = _specs(equation)
    labels = [label for label in kernel if label in inputs and label not in outputs]
    if not labels:
        return None
    label = max(labels, key=lambda label: shape[kernel.index(label)])
    return Axis(kernel.index(label), _place(inputs, label), None)


def _specs(equation: str) -> tuple[str, str, str]:
    before, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = before.split(",")
    return inputs, kernel, outputs


def _place(spec: str, label: str) -> int:
    index = spec.replace("...", "").index(label)
    return index - len(spec.replace("...", "")) if spec.startswith("...") else index
