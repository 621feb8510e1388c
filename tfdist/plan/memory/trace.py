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
from tfdist.loops.compiled_functions import CompiledFunctions
from tfdist.loops.feed import Feed
from tfdist.loops.step_options import StepOptions
from tfdist.model_setup import create
from tfdist.plan.memory import graph, liveness
from tfdist.plan.memory.liveness import Operation
from tfdist.plan.network import Network
from tfdist.strategies.base import Strategy
from tfdist.upstream.keras_optimizers import optimizers_of

#: Rows of the batches that are traced; more than one, which broadcasts.
_FEW, _MORE = 2, 4


class Traced(NamedTuple):
    """A step on one device.

    Attributes:
        weights: Bytes of each variable of the model.
        trainable: Bytes of each of those that have a gradient.
        optimizer: Bytes of each variable that the optimizer keeps.
        few: The operations on `_FEW` rows.
        more: The operations on `_MORE` rows, in the same order.
    """

    weights: list[int]
    trainable: list[int]
    optimizer: list[int]
    few: dict[str, Operation]
    more: dict[str, Operation]

    def operations(self, num_rows: int) -> dict[str, Operation]:
        """Returns the operations on a batch of so many rows."""
        steps = (num_rows - _FEW) / (_MORE - _FEW)
        found = {}
        for (name, few), more in zip(self.few.items(), self.more.values(), strict=True):
            pairs = zip(few.sizes, more.sizes, strict=True)
            sizes = [round(a + (b - a) * steps) for a, b in pairs]
            found[name] = few._replace(sizes=sizes)
        return found

    def order(self) -> list[str]:
        """Returns the operations' names in the order in which they are computed."""
        return liveness.order(self.few)


class _Listening(Strategy):
    """One device that keeps what it compiles."""

    compiled: Any

    def compile(self, *arguments: Any, **options: Any) -> Any:
        self.compiled = super().compile(*arguments, **options)
        return self.compiled


def trace(network: Network) -> Traced:
    """Traces the step that `Trainer.fit` makes.

    Raises:
        UnsupportedModelError: Batches of two sizes make different graphs.
    """
    weights, trainable, optimizer, few = _once(network, _FEW)
    *_, more = _once(network, _MORE)
    kinds = [[operation.kind for operation in found.values()] for found in (few, more)]
    if kinds[0] != kinds[1]:
        raise UnsupportedModelError(
            f"{network.model}: its graph is another one for another batch, so that its memory "
            "cannot be planned; measure it with real steps."
        )
    return Traced(weights, trainable, optimizer, few, more)


def _once(network: Network, num_rows: int) -> Any:
    """Bytes of the variables, and the operations of a step on some rows."""
    strategy = _Listening(1)
    model = create.create(network.build, strategy, network.precision)
    data = tf.data.Dataset.from_tensors(network.batch(num_rows)).repeat()
    feed = Feed(strategy, data, training=True, steps_per_epoch=1)
    options = StepOptions(precision=network.precision)
    CompiledFunctions(model, strategy, options).train(feed)
    concrete = strategy.compiled.get_concrete_function(
        iter(strategy.distribute(data)), tf.constant(1)
    )
    operations = graph.operations(graph.body_of_loop(concrete.graph))
    kept = [variable for one in optimizers_of(model) for variable in one.variables]
    groups = (model.variables, model.trainable_variables, kept)
    return *(_sizes(group) for group in groups), operations


def _sizes(variables: list[keras.Variable]) -> list[int]:
    return [int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables]
