"""Calls split layers in slices, each slice on its device.

An unmodified layer is called once per device, in a context in which each of its variables is the
slice of that device. The results are concatenated or summed on the first device. Concatenated
results remember their slices: a layer that can use them reads them on their devices, and TensorFlow
removes the concatenation that nobody reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import activations

from tfdist.strategies.tensor_parallel.row_parts import ByTensor, RowParts, drawing_part
from tfdist.strategies.tensor_parallel.splits import ELEMENTWISE, AlongAxis, Split
from tfdist.upstream.keras_layers import dropout_of, out_of_heads
from tfdist.upstream.keras_model import mask_of, set_mask, value_in_scope
from tfdist.upstream.keras_variables import part
from tfdist.upstream.patching import all_replaced, replaced


class Calls:
    """The slices of tensors in the graph that is being traced."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        self._slices: ByTensor[tuple[AlongAxis, list[tf.Tensor]]] = ByTensor()
        self._rows = RowParts(devices)
        self._by_rows = False

    @contextmanager
    def instead(
        self,
        splits: Sequence[Split],
        following: Sequence[keras.layers.Layer],
        between: Sequence[keras.Operation] = (),
        by_rows: bool = False,
    ) -> Iterator[None]:
        """A context in which layers are called in slices.

        Args:
            splits: The layers that are split.
            following: Other layers that map slices to slices.
            between: Operations that compute each row by itself.
            by_rows: Whether to divide the rows of activations between split layers.
        """
        self._by_rows = by_rows
        ways: dict[str, Callable[..., Any]] = {
            "column": self._side_by_side,
            "channels": self._side_by_side,
            "row": self._terms,
            "heads": self._heads,
            "vocabulary": self._vocabulary,
        }
        with ExitStack() as stack:
            for split in splits:
                way = functools.partial(ways[split.kind], split, split.layer.call)
                call = functools.partial(_in_parts, split, way, split.layer.call)
                stack.enter_context(replaced(split.layer, "call", call))
            for operation in between if by_rows else ():
                replacement = functools.partial(self._between, operation, operation.call)
                stack.enter_context(replaced(operation, "call", replacement))
            for layer in following:
                follow = functools.partial(self._follow, layer.call)
                stack.enter_context(replaced(layer, "call", follow))
            yield

    def _side_by_side(self, split: Split, call: Callable[..., Any], x: Any, **options: Any) -> Any:
        """Computes some of the outputs on each device."""
        layer, slices = split.layer, []
        activation = getattr(layer, "activation", None) or activations.linear
        apart = activation in ELEMENTWISE
        given = self._cut(x, split.inputs)
        for number, arguments in enumerate(given):
            with self._on(number), ExitStack() as stack:
                if not apart:  # softmax needs all channels
                    stack.enter_context(replaced(layer, "activation", None))
                if hasattr(layer, "filters"):  # a convolution reshapes its bias by it
                    filters = split.outputs.sizes[number] if split.outputs else None
                    stack.enter_context(replaced(layer, "filters", filters))
                slices.append(call(arguments, **options))
        whole = self._joined(split.outputs, slices)
        return whole if apart else activation(whole)

    def _terms(self, split: Split, call: Callable[..., Any], x: Any, **options: Any) -> Any:
        """Computes a term of all outputs on each device."""
        layer, terms = split.layer, []
        bias, activation = layer.bias, layer.activation
        without: dict[str, Any] = {"bias": None, "activation": None}
        if hasattr(layer, "use_bias"):
            without["use_bias"] = False
        with all_replaced(layer, without):
            for number, piece in enumerate(self._cut(x, split.inputs)):
                with self._on(number):
                    terms.append(call(piece, **options))

        def finished(total: tf.Tensor) -> tf.Tensor:
            if bias is None:
                return total
            if getattr(layer, "data_format", None) == "channels_first":
                return total + tf.reshape(bias.value, [1, -1] + [1] * (len(total.shape) - 2))
            return total + bias.value

        if activation is None or activation in ELEMENTWISE:
            apply = activation or activations.linear
            return self._total(terms, lambda total: apply(finished(total)))
        return activation(self._total(terms, finished))

    def _total(
        self, terms: Sequence[tf.Tensor], finish: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Sums terms, in parts of rows if activations are divided."""
        if not self._by_rows:
            return finish(tf.add_n(terms))
        parts = []
        for device, total in zip(self._devices, self._rows.reduce_scatter(terms), strict=True):
            with tf.device(device):
                parts.append(finish(total))
        return self._rows.joined(parts, terms[0].shape)

    def _heads(self, split: Split, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Computes some heads of an attention on each device."""
        out, slices = out_of_heads(split.layer), []
        dropout, queries = dropout_of(split.layer), split.cuts[0].division.sizes
        given = [t for t in keras.tree.flatten((args, options)) if _is_tensor(t)]
        masks = [mask_of(tensor) for tensor in given]
        with ExitStack() as stack:
            stack.enter_context(replaced(out, "bias", None))
            if dropout.rate:  # one seed for all slices, as in one call
                generator = dropout.seed_generator
                stack.enter_context(replaced(generator, "next", functools.cache(generator.next)))
            for number in range(len(self._devices)):
                own_args, own_options = self._gathered(number, args, options)
                tensors = [t for t in keras.tree.flatten((own_args, own_options)) if _is_tensor(t)]
                for tensor, mask in zip(tensors, masks, strict=True):
                    if mask is not None:  # the call removes it
                        set_mask(tensor, mask)
                drop = functools.partial(_dropped, dropout.call, queries, number)
                with self._on(number), replaced(dropout, "call", drop):
                    slices.append(call(*own_args, **own_options))
        outputs = [each[0] if isinstance(each, tuple) else each for each in slices]
        total = self._total(outputs, lambda t: t if out.bias is None else t + out.bias.value)
        if mask_of(outputs[0]) is not None:
            set_mask(total, mask_of(outputs[0]))
        if not isinstance(slices[0], tuple):
            return total
        return total, tf.concat([scores for _, scores in slices], -3)

    def _vocabulary(
        self, split: Split, call: Callable[..., Any], x: Any, reverse: bool = False
    ) -> tf.Tensor:
        """Looks up ids in the rows of a table that each device has, or computes their logits."""
        parts = []
        if reverse:
            for number, piece in enumerate(self._cut(x, None)):
                with self._on(number):
                    parts.append(call(piece, reverse=True))
            return self._joined(split.outputs, parts)
        for number in range(len(self._devices)):
            with self._on(number):
                parts.append(tf.convert_to_tensor(split.layer.embeddings))
        rows = looked_up(split.layer, parts, x)
        mask = keras.layers.Embedding.compute_mask(split.layer, x)
        if mask is not None:  # the call of a reversible table sets it
            set_mask(rows, mask)
        return rows

    def _follow(self, call: Callable[..., Any], x: Any, **options: Any) -> Any:
        """Calls a layer without weights on slices."""
        if x not in self._slices:
            return call(x, **options)
        division, parts = self._slices[x]
        slices = []
        for number, piece in enumerate(parts):
            with tf.device(self._devices[number]):
                slices.append(call(piece, **options))
        return self._joined(division, slices)

    def _between(
        self, operation: keras.Operation, call: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Calls an operation on parts of rows if one of its inputs is in parts or slices."""
        given = [t for t in keras.tree.flatten((args, options)) if _is_tensor(t)]
        ranks = {t.shape.rank for t in given}
        if len(ranks) != 1 or min(ranks) < 2:
            return call(*args, **options)
        for tensor in given:
            if tensor in self._slices and tensor not in self._rows:
                division, slices = self._slices[tensor]
                self._rows.add(tensor, self._rows.from_slices(slices, division.axis))
        if not any(tensor in self._rows and tensor.shape[0] != 1 for tensor in given):
            return call(*args, **options)
        if type(operation) is keras.layers.Dropout:
            return self._rows.dropout(operation, call, *args, **options)
        return self._rows.map(call, *args, **options)

    def _gathered(self, number: int, args: Any, options: Any) -> Any:
        """Returns arguments in which tensors that are in parts of rows are whole on a device."""
        return keras.tree.map_structure(lambda x: self._rows.gather(x, number), (args, options))

    @contextmanager
    def _on(self, number: int) -> Iterator[None]:
        with tf.device(self._devices[number]), part(number):
            yield

    def _joined(self, division: AlongAxis | None, parts: list[tf.Tensor]) -> tf.Tensor:
        axis = division.axis if division else -1
        whole = tf.concat(parts, axis)
        if division is not None:
            self._slices[whole] = division, parts
        return whole

    def _cut(self, x: tf.Tensor, division: AlongAxis | None) -> list[tf.Tensor]:
        if division is None:
            return [self._rows.gather(x, number) for number in range(len(self._devices))]
        if x in self._slices:
            held, parts = self._slices[x]
            rank = len(x.shape)
            if held.axis % rank == division.axis % rank and held.sizes == division.sizes:
                return parts
        return self._rows.to_slices(x, division.sizes, division.axis)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, tf.Tensor)


def _in_parts(
    split: Split, way: Callable[..., Any], call: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Calls a layer in slices, unless a scope gives its weights other values."""
    if value_in_scope(split.cuts[0].variable) is not None:
        return call(*args, **options)
    return way(*args, **options)


def _dropped(
    call: Callable[..., tf.Tensor],
    sizes: Sequence[int],
    number: int,
    weights: tf.Tensor,
    training: bool = False,
) -> tf.Tensor:
    """Drops attention weights as one device does.

    Args:
        call: The call of the Dropout layer.
        sizes: The number of heads of each slice.
        number: Number of the slice.
        weights: The weights of its heads, [rows, heads, queries, keys].
        training: As in `Dropout.call`.
    """
    with drawing_part(1, sum(sizes[:number]), sum(sizes)):
        return call(weights, training=training)


def looked_up(
    layer: keras.layers.Embedding, parts: Sequence[tf.Tensor], ids: tf.Tensor
) -> tf.Tensor:
    """Returns what an Embedding returns for ids, from slices of its table.

    This splits the vocabulary (Shoeybi et al. 2019, "Megatron-LM", section 3). There each device
    looks up all ids, returns zeros for those that it does not have, and all results are summed.
    Here each looks up its own ids only, so that the sparse gradients are those of one device, and
    no row is multiplied by zero.

    Args:
        layer: The layer.
        parts: The slices of its table, each on a device: rows in order, of sizes that differ by at
            most one, the larger ones first, as `tf.nn.embedding_lookup` requires.
        ids: Ids of any shape. Negative ids count from the end of the table, as in Keras.

    Returns:
        The rows in the layer's compute dtype. The shape is that of the ids plus the columns.
    """
    if ids.dtype not in (tf.int32, tf.int64):
        ids = tf.cast(ids, tf.int32)
    ids = tf.where(ids < 0, ids + layer.input_dim, ids)
    return tf.cast(tf.nn.embedding_lookup(list(parts), ids), layer.compute_dtype)
