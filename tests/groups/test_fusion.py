"""Splitting and packing of tensors for communication, which must not change results."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.groups.fusion import FUSION_LIMIT, fused, in_chunks

SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(["float32", "float64", "int64"])), max_size=5)


@settings(max_examples=40, deadline=None)
@given(TENSORS, st.integers(8, 100))
def test_splits_and_reassembles_tensors(
    wanted: list[tuple[tuple[int, ...], str]], num_bytes: int
) -> None:
    tensors = [
        tf.reshape(tf.cast(tf.range(int(np.prod(shape))), dtype), shape) for shape, dtype in wanted
    ]

    def doubled(pieces: list[tf.Tensor]) -> list[tf.Tensor]:
        assert all(tf.size(p) * p.dtype.size <= num_bytes for p in pieces)
        return [2 * piece for piece in pieces]

    for tensor, result in zip(tensors, in_chunks(doubled, tensors, num_bytes), strict=True):
        assert result.dtype == tensor.dtype
        np.testing.assert_array_equal(result, 2 * tensor)


def test_small_tensors_are_not_split() -> None:
    seen: list[int] = []

    def counted(pieces: list[tf.Tensor]) -> list[tf.Tensor]:
        seen.append(len(pieces))
        return pieces

    in_chunks(counted, [tf.zeros([4]), tf.zeros([4, 2])], 16)
    assert seen == [3]


def test_fusion_keeps_order_values_and_kinds() -> None:
    tensors = [
        tf.constant([[1.0, 2.0]]),
        tf.constant(3, tf.int64),
        tf.ones([FUSION_LIMIT + 1]),
        tf.IndexedSlices(tf.ones([2, 3]), tf.constant([4, 1]), tf.constant([5, 3])),
        tf.constant([5.0]),
    ]
    calls = []

    def double(packed: list) -> list:
        calls.append(len(packed))
        return [t if isinstance(t, tf.IndexedSlices) else t * 2 for t in packed]

    results = fused(double, tensors)
    assert calls == [4]  # floats, int64, the large tensor, and the slices
    for result, tensor in zip(results, tensors, strict=True):
        if isinstance(tensor, tf.IndexedSlices):
            assert result is tensor
        else:
            assert result.dtype == tensor.dtype
            np.testing.assert_array_equal(result, tensor * 2)
    assert fused(double, []) == []
