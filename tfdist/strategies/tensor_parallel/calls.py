"""The calls of split layers in one graph: a part of each on its device.

An unmodified layer is called once a device, in a context in which its variables are one part of
themselves. What it makes is laid side by side, or added up, on the first device. What was laid side
by side keeps its parts in mind: a layer that takes them as they are has them from their devices,
and the whole, which then nobody reads, is left out of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import activations

from tfdist.strategies.tensor_parallel.division import AlongAxis
from tfdist.strategies.tensor_parallel.following import ELEMENTWISE
from tfdist.strategies.tensor_parallel.split import Split
from tfdist.strategies.tensor_parallel.vocabulary import looked_up
from tfdist.upstream.keras_layers import out_of_heads
from tfdist.upstream.keras_model import mask_of, set_mask, value_in_scope
from tfdist.upstream.keras_variables import part
from tfdist.upstream.patching import replaced


class Calls:
    """What is split in the graph that is being traced.

    Args:
        devices: Of the parts.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        # By the id of a whole, which is kept, so that no other gets the id: it, and its parts.
        self._parts: dict[int, tuple[tf.Tensor, AlongAxis, list[tf.Tensor]]] = {}

    @contextmanager
    def instead(
        self, splits: Sequence[Split], following: Sequence[keras.layers.Layer]
    ) -> Iterator[None]:
        """Within it layers are called in parts.

        Args:
            splits: How they are split.
            following: Others that make parts of parts.
        """
        ways: dict[str, Callable[..., Any]] = {
            "column": self._side_by_side,
            "channels": self._side_by_side,
            "row": self._rows,
            "heads": self._heads,
            "vocabulary": self._vocabulary,
        }
        with ExitStack() as stack:
            for split in splits:
                way = functools.partial(ways[split.kind], split, split.layer.call)
                call = functools.partial(_in_parts, split, way, split.layer.call)
                stack.enter_context(replaced(split.layer, "call", call))
            for layer in following:
                follow = functools.partial(self._follow, layer.call)
                stack.enter_context(replaced(layer, "call", follow))
            yield

    def _side_by_side(self, split: Split, call: Callable[..., Any], x: Any, **options: Any) -> Any:
        """Some of the outputs on each device."""
        layer, made = split.layer, []
        activation = getattr(layer, "activation", None) or activations.linear
        apart = activation in ELEMENTWISE
        given = [x] * len(self._devices) if split.inputs is None else self._cut(x, split.inputs)
        for number, own in enumerate(given):
            with self._on(number), ExitStack() as stack:
                if not apart:  # softmax sees all channels
                    stack.enter_context(replaced(layer, "activation", None))
                if hasattr(layer, "filters"):  # by which a convolution reshapes its bias
                    filters = split.outputs.sizes[number] if split.outputs else None
                    stack.enter_context(replaced(layer, "filters", filters))
                made.append(call(own, **options))
        whole = self._joined(split.outputs, made)
        return whole if apart else activation(whole)

    def _rows(self, split: Split, call: Callable[..., Any], x: Any, **options: Any) -> Any:
        """A term of all outputs on each device."""
        layer, terms = split.layer, []
        bias, activation = layer.bias, layer.activation
        without: dict[str, Any] = {"bias": None, "activation": None}
        if hasattr(layer, "use_bias"):
            without["use_bias"] = False
        with ExitStack() as stack:
            for name, value in without.items():
                stack.enter_context(replaced(layer, name, value))
            for number, own in enumerate(self._cut(x, split.inputs)):
                with self._on(number):
                    terms.append(call(own, **options))
        total = tf.add_n(terms)
        if bias is not None:
            own_shape = [1] * (len(total.shape) - 1) + [-1]
            if getattr(layer, "data_format", None) == "channels_first":
                own_shape = [1, -1] + [1] * (len(total.shape) - 2)
            is_vector = len(bias.shape) == 1
            total += tf.reshape(bias.value, own_shape) if is_vector else bias.value
        return total if activation is None else activation(total)

    def _heads(self, split: Split, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Some of the heads of an attention on each device."""
        out, made = out_of_heads(split.layer), []
        given = [t for t in keras.tree.flatten((args, options)) if isinstance(t, tf.Tensor)]
        masks = [mask_of(tensor) for tensor in given]
        with ExitStack() as stack:
            stack.enter_context(replaced(out, "bias", None))
            for number in range(len(self._devices)):
                for tensor, mask in zip(given, masks, strict=True):
                    if mask is not None:  # the call takes it off
                        set_mask(tensor, mask)
                with self._on(number):
                    made.append(call(*args, **options))
        outputs = [each[0] if isinstance(each, tuple) else each for each in made]
        total = tf.add_n(outputs)
        if out.bias is not None:
            total += out.bias.value
        if mask_of(outputs[0]) is not None:
            set_mask(total, mask_of(outputs[0]))
        if not isinstance(made[0], tuple):
            return total
        return total, tf.concat([scores for _, scores in made], -3)

    def _vocabulary(self, split: Split, call: Callable[..., Any], ids: Any) -> tf.Tensor:
        """Some of the rows of a table on each device."""
        del call  # which would look for all ids in one part
        parts = []
        for number in range(len(self._devices)):
            with self._on(number):
                parts.append(tf.convert_to_tensor(split.layer.embeddings))
        return looked_up(split.layer, parts, ids)

    def _follow(self, call: Callable[..., Any], x: Any, **options: Any) -> Any:
        """What a layer without weights makes of parts."""
        if id(x) not in self._parts:
            return call(x, **options)
        _, division, parts = self._parts[id(x)]
        made = []
        for number, own in enumerate(parts):
            with tf.device(self._devices[number]):
                made.append(call(own, **options))
        return self._joined(division, made)

    @contextmanager
    def _on(self, number: int) -> Iterator[None]:
        with tf.device(self._devices[number]), part(number):
            yield

    def _joined(self, division: AlongAxis | None, parts: list[tf.Tensor]) -> tf.Tensor:
        axis = division.axis if division else -1
        whole = tf.concat(parts, axis)
        if division is not None:
            self._parts[id(whole)] = (whole, division, parts)
        return whole

    def _cut(self, x: tf.Tensor, division: AlongAxis | None) -> list[tf.Tensor]:
        if division is None:
            return [x] * len(self._devices)
        _, known, parts = self._parts.get(id(x), (None, None, []))
        if known is not None and _same(known, division, len(x.shape)):
            return parts
        return tf.split(x, division.sizes, division.axis)


def _in_parts(
    split: Split, way: Callable[..., Any], call: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Calls a layer in parts, if its weights are; in some scopes they have other values."""
    if value_in_scope(split.cuts[0].variable) is not None:
        return call(*args, **options)
    return way(*args, **options)


def _same(one: AlongAxis, other: AlongAxis, rank: int) -> bool:
    """Whether two divisions cut a tensor of that rank into the same parts."""
    return one.axis % rank == other.axis % rank and one.sizes == other.sizes
