"""Gradient buckets: their order and size."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfdist.groups import buckets

_KB = 1 << 10


def _gradients(*kilobytes: int) -> dict[int, Any]:
    return {i: tf.zeros([size * _KB // 4]) for i, size in enumerate(kilobytes)}


def test_buckets_follow_the_order_of_the_backward_pass() -> None:
    weights = [tf.Variable([float(i)]) for i in range(4)]
    found: list[Any] = []

    @tf.function(autograph=False)
    def backward(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            for i in (2, 0, 3, 1):  # not the order of the model's variables
                x = x * weights[i]
        found.extend(buckets.in_order(dict(enumerate(tape.gradient(x, weights))), 4))

    backward(tf.constant([1.0]))
    assert found == [[1], [3], [0], [2]]


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
