"""Process groups over different libraries exchange the same values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.commands import needs_horovod
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.errors import ClusterError, DataError, MissingError, TfdistError
from tfdist.groups.agreement import check_values, from_rank0
from tfdist.groups.base import LocalGroup, ProcessGroup, shard_sizes


def exchanges(kind: str) -> Callable[[], dict[str, Any]]:
    """Runs in a worker: joins the group, and returns a function that runs every collective."""
    if kind == "horovod":
        from tfdist.groups.horovod import HorovodGroup

        group: ProcessGroup = HorovodGroup()
    else:
        from tfdist.groups.collective import CollectiveGroup

        group = CollectiveGroup(2)

    # As an argument, because TensorFlow evaluates a Horovod op on constants ahead of time.
    def vector(rank: tf.Tensor, size: int, dtype: Any = tf.float32) -> tf.Tensor:
        return tf.cast(tf.range(size), dtype) + tf.cast(rank, dtype)

    @tf.function(autograph=False)
    def in_graph(rank: tf.Tensor) -> dict[str, Any]:
        values, rows = vector(rank, 2 + group.rank)[:, tf.newaxis], tf.range(2 + group.rank)
        if group.rank:  # other operations than on rank 0 compute them
            values, rows = tf.identity(values, name="own_values"), tf.identity(rows, name="own")
        slices = tf.IndexedSlices(values, rows, tf.constant([4, 1]))
        large = tf.ones([3, 1 << 18]) * tf.cast(rank + 1, tf.float32)
        sizes = shard_sizes(5, group.size)
        # Keras may number the names of layers differently.
        with tf.name_scope(f"layer_{group.rank}"), tf.device("CPU:0"):
            sums = group.all_reduce([vector(rank, 3), vector(rank, 2, tf.int32), slices, large])
            whole = group.all_gather(vector(rank, sizes[group.rank]), sizes, "in_graph")
            part = group.reduce_scatter([vector(rank, 5)])[0]
            first = group.broadcast_tensor(vector(rank, 2))
        return {
            "sums": sums[:2],
            "slices": tf.math.unsorted_segment_sum(sums[2].values, sums[2].indices, 4)[:, 0],
            "large": tf.reduce_mean(sums[3]),
            "whole": whole,
            "shard": part,
            "first": first,
        }

    def ask() -> dict[str, Any]:
        rank = tf.constant(group.rank)
        result = tf.nest.map_structure(lambda t: t.numpy().tolist(), in_graph(rank))
        sizes = shard_sizes(5, group.size)
        whole = group.all_gather(vector(rank, sizes[group.rank]), sizes, "eager")
        group.barrier()
        return result | {
            "again": in_graph(rank)["whole"].numpy().tolist(),
            "eager": [
                t.numpy().tolist() for t in group.all_reduce([vector(rank, 3), vector(rank, 2)])
            ],
            "eager whole": whole.numpy().tolist(),
            "bfloat16": group.broadcast_tensor(vector(rank, 2, tf.bfloat16)).numpy().tolist(),
            "numbers": group.gather([group.rank, float("nan")])[:, 0].tolist(),
            "bytes": [b.tolist() for b in group.gather_bytes(np.full(group.rank, 7, np.uint8))],
            "objects": group.gather_objects({"rank": group.rank}),
            "object": group.broadcast_object(["from", group.rank]),
            "arrays": group.sum_arrays([np.full([2], group.rank + 1.0)])[0].tolist(),
            "error": _raised(group),
        }

    return ask


def _raised(group: ProcessGroup) -> str:
    def fail() -> str:
        raise DataError("no data")

    try:
        from_rank0(group, fail)
    except TfdistError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


EXPECTED = {
    "sums": [[1.0, 3.0, 5.0], [1, 3]],
    "slices": [1.0, 3.0, 3.0, 0.0],
    "large": 3.0,
    "whole": [0.0, 1.0, 2.0, 1.0, 2.0],
    "first": [0.0, 1.0],
    "again": [0.0, 1.0, 2.0, 1.0, 2.0],
    "eager": [[1.0, 3.0, 5.0], [1.0, 3.0]],
    "eager whole": [0.0, 1.0, 2.0, 1.0, 2.0],
    "bfloat16": [0.0, 1.0],
    "numbers": [0.0, 1.0],
    "bytes": [[], [7]],
    "objects": [{"rank": 0}, {"rank": 1}],
    "object": ["from", 0],
    "arrays": [3.0, 3.0],
    "error": "DataError: no data",
}


@pytest.mark.processes
@pytest.mark.parametrize("kind", [pytest.param("horovod", marks=needs_horovod), "tensorflow"])
def test_two_processes_exchange_every_kind_of_value(kind: str) -> None:
    with WorkerPool(exchanges, kind, num_workers=2) as pool:
        first, second = pool.ask()
    assert (first.pop("shard"), second.pop("shard")) == ([1.0, 3.0, 5.0], [7.0, 9.0])
    assert first == EXPECTED
    assert second == EXPECTED


def test_single_process_receives_its_own_values() -> None:
    group, tensors = LocalGroup(), [tf.constant([1.0, 2.0])]
    assert group.all_reduce(tensors) is tensors
    assert group.reduce_scatter(tensors) is tensors
    assert group.gather([1, 2]).tolist() == [[1.0, 2.0]]
    assert group.gather_objects("own") == ["own"]
    assert group.broadcast_object("") == ""
    assert _raised(group) == "DataError: no data"


def test_errors_of_rank_0_keep_their_type_on_other_ranks() -> None:
    class SecondRank(LocalGroup):
        rank = 1

        def broadcast_object(self, value: Any) -> Any:
            return "", (MissingError, "no such library")

    with pytest.raises(MissingError, match="no such library"):
        from_rank0(SecondRank(), lambda: "not called")


def test_abstract_group_cannot_be_instantiated() -> None:
    class Incomplete(ProcessGroup):
        size, rank, local_rank = 2, 0, 0

        def all_gather(self, vector: tf.Tensor, sizes: Sequence[int], name: str) -> tf.Tensor:
            return vector

    with pytest.raises(TypeError, match="all_reduce"):
        Incomplete()  # type: ignore[abstract]


@pytest.mark.parametrize(("size", "owners", "expected"), [(5, 2, [3, 2]), (1, 3, [1, 0, 0])])
def test_shards_differ_by_one_element_at_most(size: int, owners: int, expected: list[int]) -> None:
    assert shard_sizes(size, owners) == expected


class _Pair(LocalGroup):
    """A group of two processes, in which the other has equal values or values that differ by 1."""

    def __init__(self, is_same: bool) -> None:
        super().__init__()
        self._is_same = is_same
        self.lengths: list[int] = []

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        self.lengths.append(len(numbers))
        own = np.asarray(numbers, np.float64)
        return np.stack([own, own if self._is_same else own + 1])


@pytest.mark.parametrize(("is_same", "lengths"), [(True, [1]), (False, [1, 3])])
def test_equal_variables_exchange_one_number(is_same: bool, lengths: list[int]) -> None:
    variables = [keras.Variable(np.ones(number)) for number in (1, 2, 3)]
    group = _Pair(is_same)
    with contextlib.nullcontext() if is_same else pytest.raises(ClusterError, match="3 of 3"):
        check_values(group, variables, "cure")
    assert group.lengths == lengths
