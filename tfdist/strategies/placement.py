"""Where operations run, and slices of tensors that do not keep the whole tensor in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf


def colocate_with_inputs(operation: tf.Operation) -> str:
    """Returns the device of the first input of an operation that has one, or the operation's own.

    Pass it to `tf.compat.v1.device`, so that each weight is updated on the device that holds it.
    """
    devices = (tensor.device for tensor in operation.inputs)
    return operation.device or next((device for device in devices if device), "")


def copied_slice(whole: tf.Tensor, axis: int, begin: int, end: int) -> tf.Tensor:
    """Returns a slice along an axis as a copy, so that the rest can be freed.

    Along the first axis TensorFlow returns views. A variable keeps a view that is assigned to it,
    and a sum of gradients would be computed in one. Adding an axis in front avoids that.
    """
    before = [slice(None)] * axis
    return whole[tf.newaxis][(0, *before, slice(begin, end))]


def copied_slices(whole: tf.Tensor, axis: int, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Returns consecutive slices of the given sizes along an axis: see `copied_slice`."""
    ends = itertools.accumulate(sizes, initial=0)
    return [copied_slice(whole, axis, *between) for between in itertools.pairwise(ends)]
