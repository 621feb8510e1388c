"""Gradients are packed into buckets and fused tensors, and unpacked again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.numbers import ancestors
from tfdist import strategies
from tfdist.groups import buckets, traffic
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


# ---- limit of the rate ----


_BUCKETS = 5
_SIZE = 4  # float32


def _chain(x: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    for weight in weights[::-1]:
        x = tf.tanh(x * weight)
    return x


def _with_a_skip(x: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    """A model whose first weight's gradient depends on all other gradients."""
    return _chain(x, weights) + x * weights[-1]


def _all_used_twice(x: tf.Tensor, weights: list[tf.Variable]) -> tf.Tensor:
    return _chain(_chain(x, weights), weights)


def _step(model: Callable, num_bytes: int) -> Any:
    """Returns a `tf.function` that computes gradients and simulated sums, one bucket each."""
    weights = [tf.Variable(tf.fill([_SIZE], 1.0 + i)) for i in range(_BUCKETS)]

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tuple[list, list]:
        with tf.GradientTape() as tape:
            loss = model(x, weights)
        gradients = [[gradient] for gradient in tape.gradient(loss, weights)]
        sums = [[2 * gradient] for (gradient,) in gradients]
        buckets.limit_rate(gradients, sums, num_bytes)
        return gradients, sums

    return step


def _waited_for(step: Any) -> list[list[int]]:
    """Returns, by bucket, the other buckets whose sums its gradient waits for."""
    graph = step.get_concrete_function(tf.TensorSpec([_SIZE])).graph
    flat = graph.structured_outputs
    gradients, sums = ([_source(own.op) for (own,) in each] for each in flat)
    return [
        [j for j, total in enumerate(sums) if total in ancestors(gradient)]
        for gradient in gradients
    ]


def _source(operation: tf.Operation) -> tf.Operation:
    return operation.inputs[0].op if operation.type == "Identity" else operation


@pytest.mark.parametrize(
    ("num_bytes", "unsent"), [(1, 2), (2 * 16, 2), (3 * 16, 3), (5 * 16, 5), (1 << 20, 5)]
)
def test_byte_limit_bounds_buckets_in_flight(num_bytes: int, unsent: int) -> None:
    expected = [list(range(max(0, number + 1 - unsent))) for number in range(_BUCKETS)]
    assert _waited_for(_step(_chain, num_bytes)) == expected


@pytest.mark.parametrize("model", [_chain, _with_a_skip, _all_used_twice])
def test_rate_limit_does_not_change_gradients(model: Callable) -> None:
    x = tf.linspace(-1.0, 1.0, _SIZE)
    limited, unlimited = (_step(model, num_bytes)(x) for num_bytes in (1, 1 << 20))
    for one, other in zip(tf.nest.flatten(limited), tf.nest.flatten(unlimited), strict=True):
        np.testing.assert_array_equal(one, other)


def test_sums_wait_only_for_earlier_buckets() -> None:
    for number, waited_for in enumerate(_waited_for(_step(_with_a_skip, 1))):
        assert all(other <= number - 2 for other in waited_for)


def test_side_effects_keep_their_traced_order() -> None:
    """As BatchNorm's backward all-reduce: TensorFlow orders later collectives after it."""
    weights = [tf.Variable(tf.fill([_SIZE], 1.0 + i)) for i in range(_BUCKETS)]
    token = tf.Variable(0)

    def ordered(tensor: tf.Tensor) -> tf.Tensor:
        added = tf.raw_ops.AssignAddVariableOp(resource=token.handle, value=1)
        with tf.control_dependencies([added]):
            return tf.identity(tensor)

    @tf.custom_gradient
    def normalized(x: tf.Tensor) -> Any:
        return ordered(x), ordered

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> list:
        with tf.GradientTape() as tape:
            for weight in weights[::-1]:
                x = normalized(tf.tanh(x * weight))
        gradients = tape.gradient(x, weights)
        sums = [ordered(gradient) for gradient in gradients]
        buckets.limit_rate(gradients, sums, 1)
        return sums

    assert len(step(tf.ones([_SIZE]))) == _BUCKETS
    assert int(token) == 3 * _BUCKETS


@pytest.mark.parametrize(("num_bytes", "is_delayed"), [(16, True), (None, False), ("auto", False)])
def test_two_buckets_of_the_chosen_size_are_in_flight(num_bytes: Any, is_delayed: bool) -> None:
    """The default bucket size of 25 MB is larger than these gradients."""

    @tf.function(autograph=False)
    def sums(x: tf.Tensor) -> list:
        chain = itertools.accumulate([x] * _BUCKETS, lambda before, _: tf.tanh(before))
        return buckets.each(lambda bucket: [tf.identity(t) for t in bucket],
                            [[own] for own in chain], num_bytes, wait=False)  # fmt: skip

    graph = sums.get_concrete_function(tf.TensorSpec([_SIZE])).graph
    waiting = [own for own in graph.get_operations() if own.type == "Tanh" and own.control_inputs]
    assert bool(waiting) == is_delayed


def test_eager_mode_adds_no_dependencies() -> None:
    buckets.limit_rate([[tf.ones([4])]] * 4, [[tf.ones([4])]] * 4, 1)


def test_sum_of_ones_is_the_number_of_replicas() -> None:
    seconds, total = traffic.measure_all_reduce(strategies.create("mirrored", devices=3), 4000)
    assert total == 3
    assert seconds > 0
