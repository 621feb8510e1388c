"""Contributions that one trace computes for all replicas, in few tensors from end to end.

The gradients of a network are hundreds, and so are the operations that pack them to be summed, and
take them apart again. They stand in the functions that are called on each device: between two of
those, only the sums are in the graph that grows with the replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.step.forward_backward import Contribution, shaped
from tfdist.step.one_trace import NotAloneError, OneTrace
from tfdist.strategies.collectives.fusion import packed


class Packed(NamedTuple):
    """A share's contribution, or the sum of several.

    Attributes:
        sent: What is to be summed, in few tensors.
        same: The rest of the contribution, which is the same on every share.
    """

    sent: list[Any]
    same: Contribution


class PackedShares:
    """Computes contributions by one trace, packed.

    Args:
        contribution: Returns what a share contributes. Takes the index of the replica, the rows of
            the batch, the number of the round and the share; raises `NotAloneError` where it needs
            something of other replicas.
        variables: What the gradients are of, by place.
        fewest: As of `OneTrace`.
    """

    def __init__(
        self,
        contribution: Callable[..., Contribution],
        variables: Sequence[keras.Variable],
        fewest: int,
    ) -> None:
        self._contribution, self._variables = contribution, variables
        self._one_trace = OneTrace(self._packed, fewest)
        self._like: Contribution | None = None
        self._apart: Callable[[list], list] = list

    def __call__(self, index: int, total_rows: tf.Tensor, number: Any, share: Any) -> Packed | None:
        """Returns what a share contributes; None: it has to be computed by itself."""
        if tf.executing_eagerly():
            return None
        return self._one_trace(tf.constant(index), total_rows, tf.convert_to_tensor(number), share)

    def unpacked(self, share: Packed) -> Contribution:
        """Returns a contribution, or a sum of them, with each tensor by itself."""
        apart = self._apart(list(share.sent))
        found = tf.nest.pack_sequence_as(self._like, apart).with_same(share.same)
        # Of slices that a function returns, TensorFlow no longer knows what they are slices of.
        gradients = {
            i: shaped(gradient, self._variables[i])
            if isinstance(gradient, tf.IndexedSlices)
            else gradient
            for i, gradient in found.gradients.items()
        }
        return found._replace(gradients=gradients)

    def _packed(self, *arguments: Any) -> Packed:
        found = self._contribution(*arguments)
        summable = found.summable()
        like = tf.nest.map_structure(lambda _: 0, summable)
        if self._like not in (None, like):
            raise NotAloneError("another batch contributes other things.")
        self._like = like
        sent, self._apart = packed(tf.nest.flatten(summable))
        return Packed(sent, found.same())
