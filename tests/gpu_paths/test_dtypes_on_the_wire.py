"""Tensors reach a collective in dtypes that it accepts, and one call gets tensors of one dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.gpu_paths import step_graph
from tests.gpu_paths.nccl_stand_in import NcclStandIn, nccl_dtypes
from tests.support.training import building
from tfdist.errors import ConfigurationError
from tfdist.groups.fusion import FUSION_LIMIT, fused
from tfdist.strategies.base import Strategy
from tfdist.strategies.mirrored import Mirrored
from tfdist.strategies.multi_worker import MultiWorker

DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "int8")


def hierarchical_copy() -> Strategy:
    return Mirrored(2, all_reduce="hierarchical_copy")


@pytest.mark.parametrize(
    "make", [lambda: NcclStandIn(2), hierarchical_copy, lambda: MultiWorker(2)]
)
def test_tensors_of_all_dtypes_are_summed_at_once(make: Callable[[], Strategy]) -> None:
    strategy = make()
    large = [tf.ones([FUSION_LIMIT], dtype) for dtype in ("float32", "int64", "float16")]

    @tf.function(autograph=False)
    def sums() -> list[Any]:
        small = [tf.constant([1, 2], dtype) for dtype in DTYPES]
        return strategy.local_results(strategy.run(lambda i: strategy.all_reduce(small + large)))

    for found in sums():
        assert [tensor.dtype.name for tensor in found[: len(DTYPES)]] == [*DTYPES]
        for tensor in found[: len(DTYPES)]:
            np.testing.assert_array_equal(tf.cast(tensor, tf.float64), [2, 4])
        for tensor in found[len(DTYPES) :]:
            np.testing.assert_array_equal(tf.cast(tensor, tf.float64), 2)


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("bfloat16", "sgd"),
        pytest.param("mixed_bfloat16", "adam", marks=pytest.mark.long),
        pytest.param("mixed_float16", "adam", marks=pytest.mark.long),
        ("float16", lambda: keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)),
    ],
    ids=["bfloat16", "mixed_bfloat16", "mixed_float16", "float16-accumulated"],
)
def test_nccl_trains_in_any_precision(precision: str, optimizer: Any) -> None:
    """Every replica must also use the result of the sum that detects overflow."""
    build = step_graph.build_dense(optimizer=optimizer, metrics=["mae"])
    weights = []
    for strategy in ("one_device", NcclStandIn(2)):
        trainer = tfdist.Trainer(build, strategy=strategy, precision=precision)
        trainer.fit(step_graph.batches(), epochs=2, verbose=0)
        weights.append([w.astype("float64") for w in trainer.model.get_weights()])
    for expected, found in zip(*weights, strict=True):
        np.testing.assert_allclose(found, expected, atol=0.02)


def test_nccl_finds_the_device_of_loop_results() -> None:
    """A large gradient, which is not fused, is sent after the loop of `accumulate`."""

    def embedded() -> list[Any]:
        large = keras.layers.Dense(FUSION_LIMIT // 16 + 1)
        embedding = [keras.layers.Embedding(9, 4), keras.layers.Flatten()]
        return [keras.Input((4,), dtype="int32"), *embedding, large]

    trainer = tfdist.Trainer(building(embedded), strategy=NcclStandIn(2), accumulate=2)
    trainer.fit(step_graph.batches("int32"), verbose=0)


@pytest.mark.parametrize(
    ("build", "dtype"),
    [(step_graph.build_dense(metrics=["mae"]), "float32"), (step_graph.build_embedding(), "int32")],
    ids=["dense", "embedding"],
)
def test_workers_over_nccl_send_only_dtypes_that_it_accepts(
    build: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`CollectiveReduceV2` lists bfloat16 in its op definition, but NCCL refuses it at run time."""
    monkeypatch.setattr(MultiWorker, "_uses_nccl", True)
    graphs = step_graph.step_graphs(
        MultiWorker(2), build, step_graph.batches(dtype), precision="bfloat16"
    )
    sent = [node for node in graphs.traced_nodes() if node.op.startswith("CollectiveReduce")]
    assert sent
    assert {tf.as_dtype(node.attr["T"].type) for node in sent} <= nccl_dtypes()


def test_bf16_compression_over_nccl_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiWorker, "_uses_nccl", True)
    with pytest.raises(ConfigurationError, match="use compression='fp16' or 'none'"):
        MultiWorker(2, compression="bf16")


def test_fused_integers_are_split_on_the_gpu() -> None:
    """`Split` and `SplitV` have no GPU kernel for int64."""

    @tf.function(autograph=False)
    def doubled(one: tf.Tensor, other: tf.Tensor) -> list:
        return fused(lambda packs: [2 * pack for pack in packs], [one, other])

    numbers = tf.constant([1, 2], tf.int64)
    graph = doubled.get_concrete_function(numbers, tf.constant([[3]], tf.int64)).graph
    assert not {"Split", "SplitV"} & {operation.type for operation in graph.get_operations()}
    np.testing.assert_array_equal(doubled(numbers, tf.constant([[3]], tf.int64))[1], [[6]])
