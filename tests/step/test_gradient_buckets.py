"""All-reduce of gradients in buckets: same sums, and no bucket waits for unrelated gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.step.test_shared_trace import traced_step
from tests.support.commands import needs_horovod
from tests.support.numbers import ancestors
from tfdist import strategies
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.errors import ConfigurationError
from tfdist.groups.buckets import GradientExchange
from tfdist.step.forward_backward import all_reduce_gradients
from tfdist.strategies.one_device import OneDevice

DEPTH = 3  # layers with a kernel and a bias each


def test_slices_and_dense_gradients_are_reduced_once() -> None:
    class Counting(OneDevice):
        num_tensors: list[int] = []  # noqa: RUF012 - used in this test only

        def all_reduce(self, tensors: list) -> list:
            self.num_tensors.append(len(tensors))
            return [tf.cast(2 * t.values, t.dtype) if _is_slices(t) else 2 * t for t in tensors]

    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    gradients = {0: slices, 1: tf.ones([1 << 10]), 2: tf.fill([1 << 10], 2.0)}
    strategy = Counting("CPU:0")
    strategy.exchange = GradientExchange(bucket_bytes=4 << 10)
    sums, rest = all_reduce_gradients(strategy, gradients, {"loss": tf.constant(3.0)})
    assert Counting.num_tensors == [1, 3]
    assert list(sums) == [0, 1, 2]
    assert [float(tf.reduce_max(sums[i])) for i in range(3)] == [2.0, 2.0, 4.0]
    assert float(rest["loss"]) == 6.0


def _is_slices(tensor: Any) -> bool:
    return isinstance(tensor, tf.IndexedSlices)


@pytest.mark.parametrize(("compression", "dtype"), [("fp16", tf.float16), ("bf16", tf.bfloat16)])
def test_only_gradients_are_cast_to_the_wire_dtype(compression: str, dtype: tf.DType) -> None:
    strategy = strategies.create("multi_worker", 2, compression=compression)

    @tf.function(autograph=False)
    def sums() -> Any:
        def on_replica(i: int) -> Any:
            third = tf.constant([1 / 3]) * (i + 1)
            return all_reduce_gradients(strategy, {0: third}, {"loss": third})

        return strategy.local_results(strategy.run(on_replica))

    third = tf.constant([1 / 3])
    expected = tf.cast(tf.cast(third, dtype) + tf.cast(2 * third, dtype), tf.float32)
    for gradients, rest in sums():
        assert float(gradients[0][0]) == float(expected[0])
        assert float(rest["loss"][0]) == float(3 * third[0])
    assert dtype.name in strategy.inexact["compression"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("horovod", {"compression": "bf16"}, "use compression='fp16'"),
        ("horovod", {"bucket_mb": 0}, "expected megabytes above 0, 'auto' or 'all'"),
        ("multi_worker", {"bucket_mb": "none"}, "expected megabytes above 0, 'auto' or 'all'"),
        ("mirrored", {"bucket_mb": 4}, "Remove it"),
    ],
)
def test_invalid_bucket_options_are_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        strategies.create(name, 1, **options)


def gradients_before_each_sum(name: str, num_replicas: int, **options: Any) -> dict[str, list[int]]:
    """Traces a step, and returns by device how many gradients each sum waits for, in order.

    Counts data and control dependencies on the same device. Sums of the same gradients count once.
    """
    graph = traced_step(name, num_replicas, DEPTH, **options)
    results: dict[str, list[int]] = {}
    for operation in graph.get_operations():
        if operation.type.startswith(("CollectiveReduce", "HorovodGroupedAllreduce")):
            counts = results.setdefault(operation.device, [])
            before = [one for one in ancestors(operation) if one.device == operation.device]
            number = sum(map(_is_gradient_of_variable, before))
            if counts[-1:] != [number]:
                counts.append(number)
    return results


def _is_gradient_of_variable(operation: tf.Operation) -> bool:
    """Returns whether an op computes a dense layer's kernel gradient x^T dy or bias gradient."""
    return operation.type == "BiasAddGrad" or (
        operation.type == "MatMul" and operation.get_attr("transpose_a")
    )


def test_multi_worker_buckets_wait_only_for_their_gradients() -> None:
    in_buckets = gradients_before_each_sum("multi_worker", 2, bucket_mb=1e-6)
    assert len(in_buckets) == 2  # devices
    assert all(counts == [1, 2, 3, 4, 5, 6] for counts in in_buckets.values()), in_buckets
    fused = gradients_before_each_sum("multi_worker", 2)
    assert all(counts == [6] for counts in fused.values()), fused


def _create_horovod_trace() -> Any:
    return lambda bucket_mb: list(
        gradients_before_each_sum("horovod", 1, bucket_mb=bucket_mb).values()
    )


@pytest.mark.long
@needs_horovod
def test_horovod_buckets_wait_only_for_their_gradients() -> None:
    with WorkerPool(_create_horovod_trace) as pool:
        # A bucket waits for its own gradients and for those of earlier buckets that the rate limit
        # orders, but never for the bucket just before.
        assert pool.ask(1e-6) == [[[1, 2, 3, 5]]] * 2
        assert pool.ask("all") == [[[6]]] * 2


def _create_bucket_sums() -> Any:
    """Returns a function that sums the same gradients repeatedly, and counts distinct results."""
    strategy = strategies.create("horovod", bucket_mb=1e-6)
    assert not strategy.group.sums_in_order
    random = np.random.default_rng(strategy.group.rank)
    gradients = {
        i: tf.constant(random.random(n, np.float32)) for i, n in enumerate(range(1000, 20_000, 500))
    }

    @tf.function(autograph=False)
    def sums() -> Any:
        # Gradients become available at different times in every call.
        late = {i: tf.reduce_mean(tf.random.uniform([1 + i * 9999])) for i in gradients}
        sent = {i: g + tf.math.maximum(0.0, -late[i]) for i, g in gradients.items()}
        return all_reduce_gradients(strategy, sent, {})[0]

    def ask(num_calls: int) -> int:
        results = [b"".join(g.numpy().tobytes() for g in sums().values()) for _ in range(num_calls)]
        return len(set(results))

    return ask


@pytest.mark.long
@needs_horovod
def test_buckets_in_any_order_are_bitwise_identical() -> None:
    # With two ranks, the order of summation could not change the result.
    with WorkerPool(_create_bucket_sums, num_workers=3) as pool:
        assert pool.ask(40) == [1, 1, 1]
    environ = {"HOROVOD_DISABLE_GROUP_FUSION": "0"}
    with WorkerPool(_create_buckets_wait, num_workers=1, environ=environ) as pool:
        assert pool.ask() == [True]


def _create_buckets_wait() -> Any:
    return lambda: strategies.create("horovod").buckets_wait
