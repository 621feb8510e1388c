"""The graph of a network's real training step, for batches of any size.

The step is traced twice, on small batches, and never run. The size of each tensor is extrapolated
linearly, because at most one of its axes is the batch. Thus only the variables of the network have
to fit into this machine's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.loops.data_handler import DataHandler
from tfdist.loops.functions import CompiledFunctions
from tfdist.model_setup import create
from tfdist.replica.replica import StepOptions
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Element, Share
from tfdist.strategies.one_device import OneDevice
from tfdist.tools.plan import graph
from tfdist.tools.plan.graph import Operation
from tfdist.tools.plan.network import Network
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_graphs import peak_memory

#: Rows per replica or micro-batch of the two traced batches. More than one, because an axis of size
#: one is broadcast.
FEW_ROWS, MORE_ROWS = 2, 4


class StepGraph(NamedTuple):
    """The operations of a step, for batches of any size.

    Attributes:
        few: Operations on a small batch.
        more: The same operations on a larger one, in the same order.
        num_rows: Rows of the two batches.
    """

    few: dict[str, Operation]
    more: dict[str, Operation]
    num_rows: tuple[int, int] = (FEW_ROWS, MORE_ROWS)

    def operations(self, num_rows: int) -> dict[str, Operation]:
        """Returns the operations on a batch of `num_rows`."""
        few_rows, more_rows = self.num_rows
        steps = (num_rows - few_rows) / (more_rows - few_rows)
        operations = {}
        for (name, few), more in zip(self.few.items(), self.more.values(), strict=True):
            pairs = zip(few.sizes, more.sizes, strict=True)
            operations[name] = few._replace(sizes=[round(a + (b - a) * steps) for a, b in pairs])
        return operations


def trace(
    network: Network, num_rows: int, strategy: Strategy
) -> tuple[keras.Model, dict[str, Operation]]:
    """Returns a model in the strategy's scope and the operations of its step on `num_rows` rows."""
    with _traced(network, num_rows, strategy) as (model, whole):
        devices = graph.variable_devices(whole)
        return model, graph.operations(graph.loop_body(whole), devices)


def grappler_estimate(network: Network, num_rows: int) -> int:
    """Returns the bytes of a step on one device, as estimated by TensorFlow's Grappler.

    Args:
        network: What is trained.
        num_rows: Rows of the batch, which is traced at this size.
    """
    with _traced(network, num_rows, OneDevice(1)) as (_, whole):
        return peak_memory(graph.loop_body(whole))


@contextlib.contextmanager
def _traced(
    network: Network, num_rows: int, strategy: Strategy
) -> Iterator[tuple[keras.Model, tf.Graph]]:
    """Yields a model in the strategy's scope, and the graph with the loop of its steps.

    The graph is emptied at the end, when its function is deleted.
    """
    model = create.create(network.build, strategy, network.precision)
    data = tf.data.Dataset.from_tensors(network.batch(num_rows)).repeat()
    feed = DataHandler(strategy, data, training=True, steps_per_epoch=1)
    compiled: list[Any] = []
    compile_function = strategy.feed.compile

    def compile_and_keep(*arguments: Any, **options: Any) -> Any:
        compiled.append(compile_function(*arguments, **options))
        return compiled[-1]

    with replaced(strategy.feed, "compile", compile_and_keep):
        CompiledFunctions(model, strategy, StepOptions(precision=network.precision)).train(feed)
    batches = iter(
        _of_static_sizes(strategy.feed.distribute(data), num_rows, strategy.num_replicas)
    )
    yield model, compiled[-1].get_concrete_function(batches, tf.constant(1)).graph


def _of_static_sizes(dataset: Any, num_rows: int, num_shares: int) -> Any:
    """Returns a distributed data set whose shares have static sizes, which the graph then has.

    Args:
        dataset: What `Feed.distribute` returns.
        num_rows: Rows of each batch, a multiple of `num_shares`.
        num_shares: Number of replicas or micro-batches.
    """
    if num_shares == 1:
        return dataset

    def static(tensor: Any) -> Any:
        return tf.ensure_shape(tensor, [num_rows // num_shares, *tensor.shape[1:]])

    def with_sizes(whole: Element) -> Element:
        shares = [
            Share(rows, tf.nest.map_structure(static, batch), first)
            for rows, batch, first in whole.shares
        ]
        return whole._replace(shares=tuple(shares))

    return dataset.map(tf.autograph.experimental.do_not_convert(with_sizes))


def check_same_operations(
    network: Network, few: dict[str, Operation], more: dict[str, Operation]
) -> None:
    """Checks that the graphs of two batches differ only in sizes.

    Raises:
        UnsupportedModelError: The graphs have different operations.
    """
    if [op.kind for op in few.values()] != [op.kind for op in more.values()]:
        raise UnsupportedModelError(
            f"{network.model}: the graph of its step depends on the batch size, so the memory "
            "cannot be predicted. Measure it with tfdist tune batch-size."
        )
