"""The real step of a network as a list of operations, for batches of any size.

The step is traced twice, on few rows, and computed on none of them: what a tensor takes is a
straight line through the two, because rows are one of its axes or none. So a network that this
machine could never train is planned here too; its variables have to fit into memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.loops.compiled_functions import CompiledFunctions, StepOptions
from tfdist.loops.data_handler import DataHandler
from tfdist.model_setup import create
from tfdist.plan.memory import graph, schedule, transfers
from tfdist.plan.memory.liveness import Kept
from tfdist.plan.memory.operations import Operation
from tfdist.plan.network import Network
from tfdist.strategies.base import Strategy
from tfdist.upstream.keras_optimizers import optimizers_of
from tfdist.upstream.patching import replaced

#: Rows of the batches that are traced; more than one, which broadcasts.
_FEW, _MORE = 2, 4


class Rows(NamedTuple):
    """The operations of a step, for batches of any size.

    Attributes:
        few: Operations of a small batch.
        more: Those of a larger one, in the same order.
        traced: How many rows the two have.
    """

    few: dict[str, Operation]
    more: dict[str, Operation]
    traced: tuple[int, int] = (_FEW, _MORE)

    def operations(self, num_rows: int) -> dict[str, Operation]:
        """Returns the operations on a batch of so many rows."""
        few_rows, more_rows = self.traced
        steps = (num_rows - few_rows) / (more_rows - few_rows)
        found = {}
        for (name, few), more in zip(self.few.items(), self.more.values(), strict=True):
            pairs = zip(few.sizes, more.sizes, strict=True)
            found[name] = few._replace(
                sizes=[round(a + (b - a) * steps) for a, b in pairs],
                workspaces=[
                    round(a + (b - a) * steps)
                    for a, b in zip(few.workspaces, more.workspaces, strict=True)
                ],
                work=few.work + (more.work - few.work) * steps,
            )
        return found

    def order(self) -> list[str]:
        """Returns the operations' names in the order in which they are computed."""
        return schedule.order(self.few)


class Traced(NamedTuple):
    """A step on one device.

    Attributes:
        weights: The variables of the model.
        trainable: Bytes of each of those that have a gradient.
        optimizer: What the optimizer keeps.
        rows: Its operations.
        cpus: As of `trace`.
        example: Bytes of each part of an example, and of its label.
    """

    weights: list[Kept]
    trainable: list[int]
    optimizer: list[Kept]
    rows: Rows
    cpus: int
    example: list[int]


#: The step of nothing, where nobody asks for what one device holds.
NOTHING = Traced([], [], [], Rows({}, {}), 0, [])


def trace(network: Network, cpus: int = 0) -> Traced:
    """Traces the step that `Trainer.fit` makes on one device.

    Args:
        network: What is trained.
        cpus: As of `graph.operations`.

    Raises:
        UnsupportedModelError: Batches of two sizes make different graphs.
    """
    model, few = once(network, _FEW, Strategy(1), cpus)
    _, more = once(network, _MORE, Strategy(1), cpus)
    check_alike(network, few, more)
    kept = [variable for one in optimizers_of(model) for variable in one.variables]
    return Traced(
        # Vectors begin as zeros or ones.
        [Kept(_size(v), len(v.shape) > 1) for v in model.variables],
        list(map(_size, model.trainable_variables)),
        [Kept(_size(v)) for v in kept],
        Rows(transfers.on_one(few), transfers.on_one(more)),
        cpus,
        [array.nbytes for array in network.batch(1)],
    )


def once(
    network: Network, num_rows: int, strategy: Strategy, cpus: int = 0
) -> tuple[keras.Model, dict[str, Operation]]:
    """Returns the model in the strategy's scope, and the operations of its step on some rows."""
    model = create.create(network.build, strategy, network.precision)
    data = tf.data.Dataset.from_tensors(network.batch(num_rows)).repeat()
    feed = DataHandler(strategy, data, training=True, steps_per_epoch=1)
    compiled: list[Any] = []
    plain = strategy.compile

    def compile_and_keep(*arguments: Any, **options: Any) -> Any:
        compiled.append(plain(*arguments, **options))
        return compiled[-1]

    with replaced(strategy, "compile", compile_and_keep):
        CompiledFunctions(model, strategy, StepOptions(precision=network.precision)).train(feed)
    batches = iter(strategy.distribute(data))
    graph_of = compiled[-1].get_concrete_function(batches, tf.constant(1)).graph
    homes = graph.homes_in_loop(graph_of)
    return model, graph.operations(graph.body_of_loop(graph_of), homes, cpus)


def check_alike(network: Network, few: dict[str, Operation], more: dict[str, Operation]) -> None:
    """Checks that two graphs have the same operations.

    Raises:
        UnsupportedModelError: They have not.
    """
    kinds = [[operation.kind for operation in found.values()] for found in (few, more)]
    if kinds[0] != kinds[1]:
        raise UnsupportedModelError(
            f"{network.model}: its graph is another one for another batch, so that its memory "
            "cannot be planned; measure it with real steps."
        )


def _size(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape)) * int(tf.as_dtype(variable.dtype).size)
