"""Activations between split layers in parts: each device has some of a batch's rows.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2.2. There the axis is that of the sequence. Here it is that of the batch, which every Keras model
has, and along which a part of a random draw is a slice of the draw of one device. The all-reduce
after a row split becomes a reduce-scatter, and an all-gather stands before a column split.
TensorFlow's gradients mirror both: the gradient of a gather is a sum of slices on their devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import keras
import tensorflow as tf
from keras import layers

from tfdist.strategies.tensor_parallel.splits import is_elementwise
from tfdist.upstream.features import existing
from tfdist.upstream.keras_layers import is_elementwise_operation
from tfdist.upstream.keras_model import stateless_scope
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_random import Sampler, samplers_called_by

_MERGES = (
    layers.Add, layers.Subtract, layers.Multiply, layers.Average, layers.Maximum, layers.Minimum,
)  # fmt: skip
_Value = TypeVar("_Value")
_NORMALIZATIONS = existing(layers, "LayerNormalization", "RMSNormalization")


def computes_by_rows(operation: keras.Operation) -> bool:
    """Returns whether an operation is known to compute each row by itself, cheaply.

    Other operations get whole batches on the first device.
    """
    if type(operation) in _NORMALIZATIONS:
        axes = keras.tree.flatten(operation.axis)
        return all(axis == -1 or axis > 0 for axis in axes)
    if type(operation) is layers.Dropout:
        return operation.noise_shape is None
    is_known = is_elementwise(operation) or is_elementwise_operation(operation)
    return is_known or type(operation) in _MERGES


class ByTensor(Generic[_Value]):
    """Values by tensor, which are found only in the graph and the scope where they were set.

    A rematerialized call has a scope of its own, and must not read tensors besides its inputs.
    """

    def __init__(self) -> None:
        # By id: the tensor, kept so that no other gets its id, where it was set, and the value.
        self._known: dict[int, tuple[tf.Tensor, Any, _Value]] = {}

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self._known and self._known[id(tensor)][1] == _place()

    def __getitem__(self, tensor: tf.Tensor) -> _Value:
        return self._known[id(tensor)][2]

    def __setitem__(self, tensor: tf.Tensor, value: _Value) -> None:
        self._known[id(tensor)] = tensor, _place(), value


def _place() -> tuple[Any, Any]:
    return tf.compat.v1.get_default_graph(), stateless_scope()


class RowParts:
    """Tensors whose rows are divided over the devices, in the graph that is being traced.

    A full tensor stands for its parts. TensorFlow removes it if nothing else reads it.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        self._parts: ByTensor[list[tf.Tensor]] = ByTensor()
        self._gathered: dict[tuple[int, int], tf.Tensor] = {}

    def __contains__(self, x: Any) -> bool:
        return x in self._parts

    def joined(self, parts: Sequence[tf.Tensor], shape: tf.TensorShape) -> tf.Tensor:
        """Returns the full tensor on the current device, which stands for its parts."""
        whole = tf.ensure_shape(tf.concat(parts, 0), [None, *shape[1:]])
        self.add(whole, parts)
        return whole

    def add(self, whole: tf.Tensor, parts: Sequence[tf.Tensor]) -> None:
        """Makes a full tensor stand for parts, each on its device."""
        self._parts[whole] = list(parts)

    def reduce_scatter(self, terms: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sum of terms in parts, each on its device."""
        return self._exchanged(terms, tf.add_n)

    def from_slices(self, slices: Sequence[tf.Tensor], axis: int) -> list[tf.Tensor]:
        """Returns parts with all channels of a tensor that is in slices along another axis."""
        return self._exchanged(slices, functools.partial(tf.concat, axis=axis))

    def to_slices(self, x: tf.Tensor, sizes: Sequence[int], axis: int) -> list[tf.Tensor]:
        """Returns slices of all rows along another axis, each on its device if x is in parts."""
        if x not in self:
            return tf.split(x, sizes, axis)
        cut = functools.partial(tf.split, num_or_size_splits=list(sizes), axis=axis)
        return self._exchanged(self._parts[x], functools.partial(tf.concat, axis=0), cut)

    def gather(self, x: Any, number: int) -> Any:
        """Returns all rows on a device, once for all readers; x itself if it is not in parts."""
        if x not in self:
            return x
        key = (id(x), number)
        if key not in self._gathered:
            with tf.device(self._devices[number]):
                whole = tf.concat(self._parts[x], 0)
                self._gathered[key] = tf.ensure_shape(whole, x.shape)
        return self._gathered[key]

    def map(self, call: Callable[..., Any], *args: Any, **options: Any) -> tf.Tensor:
        """Calls an operation on each part of the tensors among its arguments.

        Args:
            call: The operation's call.
            *args: Its arguments. Tensors that are not in parts are scattered, and those with a
                single row are broadcast.
            **options: Its options.
        """
        leaves = keras.tree.flatten((args, options))
        parts: list[list[tf.Tensor] | None] = []
        for leaf in leaves:
            if not isinstance(leaf, tf.Tensor) or leaf.shape[0] == 1:
                parts.append(None)
            else:
                parts.append(self._parts[leaf] if leaf in self else self._split(leaf))
        results = []
        for number, device in enumerate(self._devices):
            leaves_of_part = [
                leaf if p is None else p[number] for leaf, p in zip(leaves, parts, strict=True)
            ]
            own_args, own_options = keras.tree.pack_sequence_as((args, options), leaves_of_part)
            with tf.device(device):
                results.append(call(*own_args, **own_options))
        return self.joined(results, results[0].shape)

    def dropout(
        self, layer: layers.Dropout, call: Callable[..., Any], x: Any, training: bool = False
    ) -> Any:
        """Calls a Dropout on parts of rows, each with its rows of one draw."""
        if not training or not layer.rate:
            return self.map(call, x, training=training)
        num_rows, parts = _num_rows(x), self._parts[x]
        begins = [sum(self._sizes(num_rows)[:number]) for number in range(len(self._devices))]
        generator, results = layer.seed_generator, []
        # One seed for all parts, as in one call.
        with replaced(generator, "next", functools.cache(generator.next)):
            for device, part, begin in zip(self._devices, parts, begins, strict=True):
                with tf.device(device), drawing_part(0, begin, num_rows):
                    results.append(call(part, training=training))
        return self.joined(results, x.shape)

    def _exchanged(
        self,
        tensors: Sequence[tf.Tensor],
        combine: Callable[[Sequence[tf.Tensor]], tf.Tensor],
        cut: Callable[[tf.Tensor], list[tf.Tensor]] | None = None,
    ) -> list[tf.Tensor]:
        """Cuts each tensor on its device, and combines the pieces for each device there."""
        pieces, results = [], []
        for device, tensor in zip(self._devices, tensors, strict=True):
            with tf.device(device):
                pieces.append((cut or self._split)(tensor))
        for device, pieces_of_device in zip(self._devices, zip(*pieces, strict=True), strict=True):
            with tf.device(device):
                results.append(combine(list(pieces_of_device)))
        return results

    def _split(self, x: tf.Tensor) -> list[tf.Tensor]:
        return tf.split(x, self._sizes(_num_rows(x)), num=len(self._devices))

    def _sizes(self, num_rows: Any) -> list[Any]:
        """Returns the number of rows of each part: they differ by at most one, and may be 0."""
        num = len(self._devices)
        return [(num_rows + num - 1 - number) // num for number in range(num)]


def _num_rows(x: tf.Tensor) -> Any:
    """Returns the number of rows: an int if it is known while the graph is traced."""
    return tf.shape(x)[0] if x.shape[0] is None else x.shape[0]


def drawing_part(axis: int, begin: Any, total: Any) -> AbstractContextManager[None]:
    """Returns a context in which draws give a part of the numbers that one device draws.

    All numbers are drawn, and only the part is kept: those of one device are defined for all.
    """

    def draw(sampler: Sampler, shape: Any, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
        shape = tf.convert_to_tensor(shape)
        whole = tf.concat([shape[:axis], [total], shape[axis + 1 :]], 0)
        numbers = sampler.draw(whole, key=key, counter=counter)
        return numbers[(slice(None),) * axis + (slice(begin, begin + shape[axis]),)]

    return samplers_called_by(draw)
