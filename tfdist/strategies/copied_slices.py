"""Slices of a tensor that are no views of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tensorflow as tf


def copied_slice(whole: tf.Tensor, axis: int, begin: int, end: int) -> tf.Tensor:
    """Returns a slice along an axis, which does not keep the rest in memory.

    Along its first axis TensorFlow gives views. A variable keeps one that is assigned to it, and a
    sum of gradients is made in one: here the first axis is another.
    """
    before = [slice(None)] * axis
    return whole[tf.newaxis][(0, *before, slice(begin, end))]


def copied_slices(whole: tf.Tensor, axis: int, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Returns slices of those sizes, one after the other; see `copied_slice`."""
    ends = itertools.accumulate(sizes, initial=0)
    return [copied_slice(whole, axis, *between) for between in itertools.pairwise(ends)]
