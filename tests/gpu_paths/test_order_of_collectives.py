"""Collectives of one device have an order within a step, the same on every device."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.gpu_paths import step_graph
from tfdist.strategies.multi_worker import MultiWorker


def unordered(graphs: step_graph.StepGraphs) -> list[tuple[str, str]]:
    """Returns the pairs of a device's collectives that an iteration may run in either order."""
    order = step_graph.Order(graphs)
    found = []
    for nodes in graphs.by_device:
        before = {name: order.before(name) for name in collectives(nodes)}
        found += [
            (one, other)
            for one, other in itertools.combinations(before, 2)
            if one not in before[other] and other not in before[one]
        ]
    return found


def collectives(nodes: list[tf.compat.v1.NodeDef]) -> list[str]:
    """Returns the names of TensorFlow's collectives among nodes."""
    return [node.name for node in nodes if node.op.startswith("Collective")]


@pytest.mark.parametrize(
    ("build", "dtype", "options"),
    [
        (step_graph.build_embedding(), "int32", {}),
        pytest.param(
            step_graph.build_embedding(
                optimizer=lambda: keras.optimizers.SGD(gradient_accumulation_steps=2)
            ),
            "int32",
            {"precision": "mixed_float16"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            step_graph.build_embedding(metrics=["mae", keras.metrics.AUC()]),
            "int32",
            {"accumulate": 2},
            marks=pytest.mark.long,
        ),
        pytest.param(
            step_graph.build_dense(metrics=["mae"]), "float32", {}, marks=pytest.mark.long
        ),
    ],
    ids=["embedding", "gradient-accumulation", "accumulate-and-metrics", "dense"],
)
def test_any_two_of_a_device_have_an_order(build: Any, dtype: str, options: dict[str, Any]) -> None:
    """NCCL hangs where two devices launch the same collectives in different orders."""
    graphs = step_graph.step_graphs(MultiWorker(2), build, step_graph.batches(dtype), **options)
    assert len([nodes for nodes in graphs.by_device if collectives(nodes)]) == 2
    assert not unordered(graphs)
