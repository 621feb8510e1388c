"""Gradients are packed into buckets and fused tensors, and unpacked again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.groups import buckets
from tfdist.groups.fusion import FUSION_LIMIT, fused, in_chunks

_KB = 1 << 10


def _gradients(*kilobytes: int) -> dict[int, Any]:
    return {i: tf.zeros([size * _KB // 4]) for i, size in enumerate(kilobytes)}


def test_buckets_follow_the_order_of_the_backward_pass() -> None:
    weights = [tf.Variable([float(i)]) for i in range(4)]
    results: list[Any] = []

    @tf.function(autograph=False)
    def backward(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            for i in (2, 0, 3, 1):  # not the order of the model's variables
                x = x * weights[i]
        results.extend(buckets.in_order(dict(enumerate(tape.gradient(x, weights))), 4))

    backward(tf.constant([1.0]))
    assert results == [[1], [3], [0], [2]]


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (None, [[4, 3, 2, 1, 0]]),
        (3 * _KB, [[4, 3], [2], [1, 0]]),
        (1, [[4], [3], [2], [1], [0]]),
        ("auto", [[4, 3, 2, 1, 0]]),
    ],
)
def test_buckets_respect_the_size_limit(num_bytes: Any, expected: list) -> None:
    assert buckets.in_order(_gradients(1, 1, 9, 1, 2), num_bytes) == expected


def test_default_bucket_size_is_an_eighth_of_the_gradients() -> None:
    assert buckets.in_order(_gradients(*[4096] * 4), "auto") == [[3], [2], [1], [0]]
    assert buckets.in_order({}, "auto") == [[]]


@pytest.mark.parametrize("wait", [True, False])
def test_bucket_waits_for_the_previous_one_on_request(wait: bool) -> None:
    @tf.function(autograph=False)
    def sums() -> list:
        return buckets.each(
            lambda bucket: [tf.identity(t, name="sum") for t in bucket],
            [[tf.zeros([1]), tf.zeros([1])], [tf.zeros([2])], [tf.zeros([3])]],
            None,
            wait,
        )

    graph = sums.get_concrete_function().graph
    waits = {
        operation.name: [before.name for before in operation.control_inputs]
        for operation in graph.get_operations()
        if operation.name.startswith("sum")
    }
    before = {"sum_2": ["sum", "sum_1"], "sum_3": ["sum_2"]} if wait else {}
    assert waits == {"sum": [], "sum_1": [], "sum_2": [], "sum_3": []} | before


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
