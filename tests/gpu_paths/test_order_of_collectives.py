"""Collectives of one device have an order within a step, the same on every device."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.gpu_paths import step_graph
from tests.support.commands import needs_horovod
from tfdist import strategies
from tfdist.cluster.launcher.worker_pool import WorkerPool
from tfdist.strategies.feed import DevicePrefetch
from tfdist.strategies.multi_worker import MultiWorker


def unordered(graphs: step_graph.StepGraphs) -> list[tuple[str, str]]:
    """Returns the pairs of a device's collectives that an iteration may run in either order."""
    order = step_graph.Order(graphs)
    results = []
    for nodes in graphs.by_device:
        before = {name: order.before(name) for name in collectives(nodes)}
        results += [
            (one, other)
            for one, other in itertools.combinations(before, 2)
            if one not in before[other] and other not in before[one]
        ]
    return results


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
            step_graph.build_embedding(metrics=["mae", "AUC"]),
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
def test_collectives_of_a_device_are_ordered(
    build: Any, dtype: str, options: dict[str, Any]
) -> None:
    """NCCL hangs where two devices launch the same collectives in different orders."""
    graphs = step_graph.step_graphs(MultiWorker(2), build, step_graph.batches(dtype), **options)
    assert len([nodes for nodes in graphs.by_device if collectives(nodes)]) == 2
    assert not unordered(graphs)


def _in_worker(name: str) -> Any:
    """In a worker: returns a function that returns the collectives and their unordered pairs."""
    strategy = strategies.create(name)
    if isinstance(strategy, MultiWorker):  # as on GPUs
        strategy.feed = DevicePrefetch(strategy.devices, strategy.group, strategy._places)

    def answer(unknown_length: bool) -> tuple[list[str], list[tuple[str, str]]]:
        data = step_graph.batches("int32")
        data = data.filter(lambda *_: True) if unknown_length else data
        graphs = step_graph.step_graphs(strategy, step_graph.build_embedding(), data)
        names = [n.name for n in graphs.nodes() if n.op.startswith(("Collective", "Horovod"))]
        return names, unordered(graphs)

    return answer


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["multi_worker", pytest.param("horovod", marks=[pytest.mark.long, needs_horovod])]
)
def test_order_over_two_workers(name: str) -> None:
    """Horovod needs no order: it pairs operations by their names, which are unique in a graph."""
    with WorkerPool(_in_worker, name) as pool:
        (names, pairs), (others, _) = pool.ask(True)
        of_known_length, _ = pool.ask(False)[0]
    assert sorted(names) == sorted(others)
    assert len(names) == len(set(names)) > 0
    assert not pairs
    # Finding the end of the data needs no collective.
    assert len(of_known_length) == len(names)
