"""Variables that are kept in parts, joined layer by layer: before it computes, and on the way back.

ZeRO 3 (Rajbhandari et al. 2020, section 5.3): a weight is whole while its layer computes, and is
joined once more where the way back reads it. So that not all are joined at the beginning, each
waits for what enters the layer before its own: one layer's are under way while one computes.

What the way back reads of joined variables is joined once more, so that it need not be kept.

TensorFlow's gradients read the tensors of the forward pass. Their inputs are exchanged for others,
of the same elements, that are there later. A join waits for a gradient that is there before, so
that no circle comes of it: gradients are made in an order in which they can be computed.

Where assignments are kept aside, and what is kept in parts is joined where it is read.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.groups.fusion import local_sum
from tfdist.upstream.keras_graph import operations_called_through
from tfdist.upstream.keras_model import stateless_scope
from tfdist.upstream.keras_variables import ShardedVariable, is_joined_to_read, source_of
from tfdist.upstream.tensorflow_graphs import exchange_input, without_tapes


@dataclasses.dataclass(frozen=True)
class GatheredParameter:
    """A variable that was joined.

    Attributes:
        variable: Which.
        whole: All of it, in the format in which it crossed.
        reads: What layers compute with, of which gradients are taken.
    """

    variable: ShardedVariable
    whole: tf.Tensor
    reads: list[tf.Tensor] = dataclasses.field(default_factory=list)


class ParameterGather:
    """What a replica's forward pass reads of variables that are kept in parts.

    Attributes:
        tape: That is to know what is read.
    """

    def __init__(self) -> None:
        self.tape: tf.GradientTape | None = None
        self._graph = _graph()
        self._joins: dict[tuple[int, tf.DType], GatheredParameter] = {}
        # What entered the layer that is called, the one that joined last, and the one before it.
        self._entered: tf.Tensor | None = None
        self._last: tf.Tensor | None = None
        self._before: tf.Tensor | None = None

    def enter(self, inputs: Any) -> None:
        """Notes what a layer is called with, which later joins wait for."""
        for leaf in keras.tree.flatten(inputs):
            if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is self._graph:
                self._entered = leaf
                return

    def read(self, variable: ShardedVariable) -> tf.Tensor:
        """Returns a variable for a layer, in the format in which that reads it."""
        dtype = tf.as_dtype(variable.dtype)
        # Inside of a loop the gradients of all turns are added up in the format of what is read.
        if dtype == variable.parts[0].dtype or _graph() is not self._graph:
            return self.whole(variable)
        # Each time another tensor, so that gradients are added up in the variable's own format.
        join = self._join(variable, dtype)
        return self._noted(join, tf.identity(join.whole))

    def whole(self, variable: ShardedVariable) -> tf.Tensor:
        """Returns a variable in its own format."""
        join = self._join(variable, variable.parts[0].dtype)
        return join.reads[0] if join.reads else self._noted(join, join.whole)

    def reads(self, variable: ShardedVariable) -> list[tf.Tensor]:
        """Returns what was read of a variable."""
        own = [join.reads for (number, _), join in self._joins.items() if number == id(variable)]
        return [tensor for reads in own for tensor in reads]

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """Within it gradients of what was read are taken: their operations join it again."""
        if self._graph is None:
            yield
            return
        num_before = len(self._graph.get_operations())
        yield
        gather_again(self._graph, num_before, list(self._joins.values()))

    def _join(self, variable: ShardedVariable, dtype: tf.DType) -> GatheredParameter:
        key = (id(variable), dtype)
        if key not in self._joins:
            with self._after_the_layer_before():
                self._joins[key] = GatheredParameter(variable, variable.joined(dtype))
        return self._joins[key]

    def _noted(self, join: GatheredParameter, tensor: tf.Tensor) -> tf.Tensor:
        if self.tape is not None:
            self.tape.watch(tensor)
        join.reads.append(tensor)
        return tensor

    @contextmanager
    def _after_the_layer_before(self) -> Iterator[None]:
        """Outside of loops, too, where the way back finds it."""
        if self._entered is not self._last:
            self._before, self._last = self._last, self._entered
        with ExitStack() as stack:
            # TensorFlow would run a part of the gradient of Horovod's operation while it traces.
            stack.enter_context(without_tapes())
            if _graph() is not self._graph:
                outside = tf.init_scope() if self._graph is None else self._graph.as_default()
                stack.enter_context(outside)
            if self._before is not None:
                stack.enter_context(tf.control_dependencies([self._before]))
            yield


def total(gradients: list[Any], variable: ShardedVariable) -> Any:
    """Returns the gradient of a variable from those of what was read of it, or None."""
    there = [tf.cast(g, variable.parts[0].dtype) for g in gradients if g is not None]
    slices = [gradient for gradient in there if isinstance(gradient, tf.IndexedSlices)]
    if slices:  # which the strategy refuses, by name
        return slices[0]
    return local_sum(there) if there else None


def layer_inputs_noted(model: keras.Model) -> AbstractContextManager[None]:
    """Returns a context in which the scopes of replicas know what layers are called with."""
    if not any(map(is_joined_to_read, model.variables)):
        return nullcontext()
    return operations_called_through(_entering)


def _entering(call: Any, operation: Any, *args: Any, **options: Any) -> Any:
    joins = getattr(stateless_scope(), "joins", None)
    if joins is not None:
        joins.enter((args, options))
    return call(operation, *args, **options)


def _graph() -> tf.Graph | None:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


#: Operations that ask for sizes, which are known, and so keep no elements.
_OF_SIZES = ("Shape", "ShapeN", "Size", "Rank")


class _Use(NamedTuple):
    """An operation of the way back that reads what was joined.

    Attributes:
        place: Its number among the operations of the graph.
        operation: Itself.
        read: What it takes.
    """

    place: int
    operation: tf.Operation
    read: tf.Tensor


def gather_again(graph: tf.Graph, num_before: int, joins: Sequence[GatheredParameter]) -> None:
    """Lets operations read variables that are joined for them.

    Args:
        graph: That is traced.
        num_before: Operations that it had before gradients were taken.
        joins: Of the forward pass.
    """
    if not joins:
        return
    operations = enumerate(graph.get_operations())
    made = {own.name: place for place, own in operations if place >= num_before}
    with_uses = [(join, uses) for join in joins if (uses := _uses(join, made))]
    gate: tf.Tensor | None = None
    for join, uses in sorted(with_uses, key=lambda pair: pair[1][0].place):
        if gate is not None:  # what is used first has only just been read
            with tf.control_dependencies([gate]):
                whole = join.variable.joined(join.whole.dtype)
            for use in uses:
                exchange_input(use.operation, use.read, whole)
        gate = _gradient_into(uses[0], made, gate)


def _uses(join: GatheredParameter, made: Mapping[str, int]) -> list[_Use]:
    """Returns the operations that use a join, the first to be computed first."""
    found = [
        _Use(made[own.name], own, read)
        for read in join.reads
        for own in read.consumers()
        if own.name in made and own.type not in _OF_SIZES
    ]
    return sorted(found, key=operator.attrgetter("place"))


def _gradient_into(
    use: _Use, made: Mapping[str, int], otherwise: tf.Tensor | None
) -> tf.Tensor | None:
    """Returns a gradient that an operation takes, for others to wait for."""
    inputs = use.operation.inputs
    return next((t for t in inputs if t is not use.read and t.op.name in made), otherwise)


class Scope(keras.StatelessScope):
    """A `keras.StatelessScope` that knows which variables were assigned to, a model's or not.

    Attributes:
        updated: They by their ids, in the order in which they first were.
        joins: Of variables that are kept in parts, as far as they were read.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.updated: dict[int, keras.Variable] = {}
        self.joins = ParameterGather()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns what a variable is in here; None: what it is outside."""
        value = self.assigned(variable)
        if value is None and is_joined_to_read(variable):
            return self.joins.read(variable)
        return value

    def assigned(self, variable: keras.Variable) -> Any:
        """Returns what a variable was given in here, or None."""
        return super().get_current_value(variable)

    def whole(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns what a variable that is kept in parts is together, in its own format, or None."""
        return self.joins.whole(variable) if is_joined_to_read(variable) else None

    def source(self, variable: keras.Variable) -> Any:
        """Returns what gradients of a variable are taken of.

        A layer may have assigned to it: then of the new value. Of what is joined where it is read:
        a list of the tensors that were read.
        """
        new = self.assigned(variable)
        if new is not None:
            return new
        return self.joins.reads(variable) if is_joined_to_read(variable) else source_of(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Keeps a variable's new value aside."""
        self.updated[id(update[0])] = update[0]
        super().add_update(update)
