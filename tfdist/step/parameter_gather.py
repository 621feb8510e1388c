"""All-gather of sharded variables, layer by layer, for the forward and for the backward pass.

As in ZeRO stage 3 (Rajbhandari et al. 2020, section 5.3), a sharded weight is whole only while its
layer computes: it is gathered before the layer runs, and once more where the backward pass reads
it. Each gather waits for the inputs of the layer before, so that one layer's weights are under way
while one layer computes, and not all of them are gathered at the beginning.

For the backward pass, TensorFlow's gradient operations read the tensors of the forward pass. Their
inputs are replaced by tensors that are gathered later. Each of these gathers waits for a gradient
that is computed before it is needed. Since gradient operations are created in an order in which
they can run, this causes no cycle.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.groups.fusion import local_sum
from tfdist.upstream.keras_variables import ShardedVariable
from tfdist.upstream.tensorflow_graphs import exchange_input, without_tapes

#: Operations that read only the size of a tensor, which keeps no elements in memory.
_SIZE_OPERATIONS = ("Shape", "ShapeN", "Size", "Rank")


def current_graph() -> tf.Graph | None:
    """Returns the graph that is being traced; None outside of any graph."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


@dataclasses.dataclass(frozen=True)
class GatheredParameter:
    """A sharded variable that was gathered.

    Attributes:
        variable: The variable.
        whole: All of its elements, in the dtype in which they were gathered.
        reads: The tensors that layers compute with, which gradients are taken of.
    """

    variable: ShardedVariable
    whole: tf.Tensor
    reads: list[tf.Tensor] = dataclasses.field(default_factory=list)


class ParameterGather:
    """Gathers the sharded variables that a replica's forward pass reads.

    Args:
        graph: The graph of the forward pass; None if it runs eagerly.
        tape: Watches every tensor that is read, if there is one.
    """

    def __init__(self, graph: tf.Graph | None, tape: tf.GradientTape | None) -> None:
        self._graph, self._tape = graph, tape
        self._gathered: dict[tuple[int, tf.DType], GatheredParameter] = {}
        # Inputs of the layer that is called now, of the layer that gathered last, and of the one
        # that gathered before that.
        self._inputs: tf.Tensor | None = None
        self._last: tf.Tensor | None = None
        self._before: tf.Tensor | None = None

    def enter(self, inputs: Any) -> None:
        """Notes what a layer is called with, for later gathers to wait for."""
        for leaf in keras.tree.flatten(inputs):
            if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is self._graph:
                self._inputs = leaf
                return

    def read(self, variable: ShardedVariable) -> tf.Tensor:
        """Returns a variable for a layer, in the dtype in which the layer reads it."""
        dtype = tf.as_dtype(variable.dtype)
        # Inside of a loop, the gradients of all iterations are summed in the dtype that is read.
        if dtype == variable.parts[0].dtype or current_graph() is not self._graph:
            return self.whole(variable)
        # A new tensor for each read, so that gradients are summed in the variable's own dtype.
        gathered = self._gather(variable, dtype)
        return self._noted(gathered, tf.identity(gathered.whole))

    def whole(self, variable: ShardedVariable) -> tf.Tensor:
        """Returns a variable in its own dtype."""
        gathered = self._gather(variable, variable.parts[0].dtype)
        return gathered.reads[0] if gathered.reads else self._noted(gathered, gathered.whole)

    def reads(self, variable: ShardedVariable) -> list[tf.Tensor]:
        """Returns all tensors that were read of a variable."""
        of_variable = [one for (key, _), one in self._gathered.items() if key == id(variable)]
        return [tensor for gathered in of_variable for tensor in gathered.reads]

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Returns a context to compute gradients in; their operations gather variables again."""
        if self._graph is None:
            yield
            return
        num_before = len(self._graph.get_operations())
        yield
        _gather_again(self._graph, num_before, list(self._gathered.values()))

    def _gather(self, variable: ShardedVariable, dtype: tf.DType) -> GatheredParameter:
        key = (id(variable), dtype)
        if key not in self._gathered:
            with self._after_previous_layer():
                self._gathered[key] = GatheredParameter(variable, variable.joined(dtype))
        return self._gathered[key]

    def _noted(self, gathered: GatheredParameter, tensor: tf.Tensor) -> tf.Tensor:
        if self._tape is not None:
            self._tape.watch(tensor)
        gathered.reads.append(tensor)
        return tensor

    @contextmanager
    def _after_previous_layer(self) -> Iterator[None]:
        """Lets operations wait for the layer before, outside of loops, for the backward pass."""
        if self._inputs is not self._last:
            self._before, self._last = self._last, self._inputs
        with ExitStack() as stack:
            # With a tape, TensorFlow would run a part of the gradient of Horovod's operation while
            # it traces.
            stack.enter_context(without_tapes())
            if current_graph() is not self._graph:
                outside = tf.init_scope() if self._graph is None else self._graph.as_default()
                stack.enter_context(outside)
            if self._before is not None:
                stack.enter_context(tf.control_dependencies([self._before]))
            yield


def total_gradient(gradients: list[Any], variable: ShardedVariable) -> Any:
    """Returns the gradient of a variable from those of all tensors read of it, or None."""
    found = [tf.cast(g, variable.parts[0].dtype) for g in gradients if g is not None]
    slices = [gradient for gradient in found if isinstance(gradient, tf.IndexedSlices)]
    if slices:  # which the strategy refuses, with the name of the variable
        return slices[0]
    return local_sum(found) if found else None


class _Use(NamedTuple):
    """An operation of the backward pass that reads a gathered variable.

    Attributes:
        place: Its number among the operations of the graph.
        operation: The operation.
        read: The tensor that it takes.
    """

    place: int
    operation: tf.Operation
    read: tf.Tensor


def _gather_again(graph: tf.Graph, num_before: int, gathered: Sequence[GatheredParameter]) -> None:
    """Gathers variables again for the operations of the backward pass.

    Args:
        graph: The graph that is being traced.
        num_before: Number of operations that it had before gradients were computed.
        gathered: All variables that the forward pass gathered.
    """
    if not gathered:
        return
    operations = enumerate(graph.get_operations())
    backward = {one.name: place for place, one in operations if place >= num_before}
    with_uses = [(one, uses) for one in gathered if (uses := _uses(one, backward))]
    gate: tf.Tensor | None = None
    for one, uses in sorted(with_uses, key=lambda pair: pair[1][0].place):
        if gate is not None:  # the variable that is used first was gathered only just before
            with tf.control_dependencies([gate]):
                whole = one.variable.joined(one.whole.dtype)
            for use in uses:
                exchange_input(use.operation, use.read, whole)
        gate = _gradient_into(uses[0], backward, gate)


def _uses(gathered: GatheredParameter, backward: Mapping[str, int]) -> list[_Use]:
    """Returns the backward operations that read a variable, in the order in which they run."""
    found = [
        _Use(backward[consumer.name], consumer, read)
        for read in gathered.reads
        for consumer in read.consumers()
        if consumer.name in backward and consumer.type not in _SIZE_OPERATIONS
    ]
    return sorted(found, key=operator.attrgetter("place"))


def _gradient_into(
    use: _Use, backward: Mapping[str, int], otherwise: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns a gradient that an operation takes, for other gathers to wait for."""
    inputs = use.operation.inputs
    return next((t for t in inputs if t is not use.read and t.op.name in backward), otherwise)
