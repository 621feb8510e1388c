"""The graphs of one training step, as traced and as run."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from tests.support.training import building
from tfdist.strategies import Strategy
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_graphs import graphs_run_by

#: Rows of the data that `run_steps` trains on by default, and of their global batches: the last
#: batch is a partial one.
NUM_ROWS, BATCH_SIZE = 20, 8


@dataclasses.dataclass(frozen=True)
class StepGraphs:
    """The graphs of the training loop of one `fit`.

    Attributes:
        traced: The loop as it was traced. Devices are those that the code asked for.
        by_device: The nodes of the loop after placement and optimization, functions inlined, one
            list per device.
        loop: The compiled loop. TensorFlow empties the graphs of a function that is deleted, and
            nothing else holds it once its trainer is collected.
    """

    traced: tf.Graph
    by_device: list[list[tf.compat.v1.NodeDef]]
    loop: Any

    def traced_nodes(self) -> Iterator[tf.compat.v1.NodeDef]:
        """Yields the nodes of the loop as traced, and of the functions that it calls."""
        graph = self.traced.as_graph_def()
        yield from graph.node
        for function in graph.library.function:
            yield from function.node_def

    def nodes(self) -> Iterator[tf.compat.v1.NodeDef]:
        """Yields the nodes of the loop as run, on any device."""
        for nodes in self.by_device:
            yield from nodes


#: Returns functions that build a network of two layers, given arguments of `building`.
build_dense = functools.partial(
    building, lambda: [keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)], optimizer="sgd"
)

#: The same for a network with an embedding, whose gradient is `tf.IndexedSlices`.
build_embedding = functools.partial(
    building,
    lambda: [
        keras.Input((4,), dtype="int32"),
        layers.Embedding(50, 4),
        layers.Flatten(),
        layers.Dense(1),
    ],
    optimizer="sgd",
)


def step_graphs(
    strategy: Strategy,
    build: Callable[[], keras.Model],
    data: tf.data.Dataset | None = None,
    steps_per_epoch: int | None = None,
    **options: Any,
) -> StepGraphs:
    """Trains for one epoch and returns the graphs of the training loop.

    Args:
        strategy: The strategy.
        build: Builds the compiled model.
        data: Batches; None: `NUM_ROWS` rows of small numbers with 4 columns.
        steps_per_epoch: As in `keras.Model.fit`.
        **options: Options of `tfdist.Trainer`.
    """
    data = batches() if data is None else data
    trainer = tfdist.Trainer(build, strategy=strategy, **options)
    loops: list[Any] = []
    calls: list[tuple[Any, ...]] = []
    compile_loop = strategy.feed.compile

    def compile_and_keep(*arguments: Any, **keywords: Any) -> Any:
        loop = compile_loop(*arguments, **keywords)
        loops.append(loop)

        def call(*loop_arguments: Any) -> Any:
            calls.append(loop_arguments)
            return loop(*loop_arguments)

        return call

    with replaced(strategy.feed, "compile", compile_and_keep):
        run = graphs_run_by(lambda: trainer.fit(data, steps_per_epoch=steps_per_epoch, verbose=0))
    traced = loops[0].get_concrete_function(*calls[0]).graph
    of_loop = max(run, key=lambda graph: _likeness(graph, traced))
    return StepGraphs(traced, [[*part.node] for part in of_loop.partition_graphs], loops[0])


def _likeness(run: Any, traced: tf.Graph) -> tuple[int, int]:
    """Returns how many names a graph that has run shares with a traced one, and its size.

    One trace can run as several graphs: the largest is the one that was divided among the devices.
    """
    names = {operation.name for operation in traced.get_operations()}
    shared = names & {node.name for node in run.pre_optimization_graph.node}
    return len(shared), sum(len(part.node) for part in run.partition_graphs)


def batches(dtype: str = "float32") -> tf.data.Dataset:
    """Returns a finite dataset of batches of 4 columns and a label, the last batch smaller."""
    x = np.random.default_rng(0).integers(0, 9, (NUM_ROWS, 4)).astype(dtype)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1].astype("float32"))).batch(BATCH_SIZE)


class Order:
    """The order of nodes within one iteration of the loop, over all devices."""

    def __init__(self, graphs: StepGraphs) -> None:
        nodes = list(graphs.nodes())
        self._nodes = {node.name: node for node in nodes}
        self._sends: dict[bytes, list[str]] = collections.defaultdict(list)
        for node in nodes:
            if node.op in ("_Send", "_HostSend"):
                self._sends[node.attr["tensor_name"].s].append(node.name)

    def before(self, name: str) -> set[str]:
        """Returns the names of all nodes that a node waits for within an iteration."""
        results: set[str] = set()
        left = [name]
        while left:
            for before in self._awaited(self._nodes[left.pop()]):
                if before not in results:
                    results.add(before)
                    left.append(before)
        return results

    def _awaited(self, node: tf.compat.v1.NodeDef) -> list[str]:
        if node.op == "NextIteration":  # its input belongs to the previous iteration
            return []
        if node.op in ("_Recv", "_HostRecv"):
            return self._sends[node.attr["tensor_name"].s] + _inputs(node)
        return _inputs(node)


def _inputs(node: tf.compat.v1.NodeDef) -> list[str]:
    return [taken.lstrip("^").partition(":")[0] for taken in node.input]
