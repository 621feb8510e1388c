"""Variables that are kept in parts, joined layer by layer: before it computes, and on the way back.

ZeRO 3 (Rajbhandari et al. 2020, section 5.3): a weight is whole while its layer computes, and is
joined once more where the way back reads it. So that not all are joined at the beginning, each
waits for what enters the layer before its own: one layer's are under way while one computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from tfdist.step.join_again import join_again
from tfdist.strategies.collectives.local_sum import local_sum
from tfdist.upstream.keras_graph import operations_called_through
from tfdist.upstream.keras_model import stateless_scope
from tfdist.upstream.keras_variables import VariableOfParts, is_joined_to_read
from tfdist.upstream.tensorflow_graphs import without_tapes


@dataclasses.dataclass(frozen=True)
class Join:
    """A variable that was joined.

    Attributes:
        variable: Which.
        whole: All of it, in the format in which it crossed.
        reads: What layers compute with, of which gradients are taken.
    """

    variable: VariableOfParts
    whole: tf.Tensor
    reads: list[tf.Tensor] = dataclasses.field(default_factory=list)


class Joins:
    """What a replica's forward pass reads of variables that are kept in parts.

    Attributes:
        tape: That is to know what is read.
    """

    def __init__(self) -> None:
        self.tape: tf.GradientTape | None = None
        self._graph = _graph()
        self._joins: dict[tuple[int, tf.DType], Join] = {}
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

    def read(self, variable: VariableOfParts) -> tf.Tensor:
        """Returns a variable for a layer, in the format in which that reads it."""
        dtype = tf.as_dtype(variable.dtype)
        # Inside of a loop the gradients of all turns are added up in the format of what is read.
        if dtype == variable.parts[0].dtype or _graph() is not self._graph:
            return self.whole(variable)
        # Each time another tensor, so that gradients are added up in the variable's own format.
        join = self._join(variable, dtype)
        return self._noted(join, tf.identity(join.whole))

    def whole(self, variable: VariableOfParts) -> tf.Tensor:
        """Returns a variable in its own format."""
        join = self._join(variable, variable.parts[0].dtype)
        return join.reads[0] if join.reads else self._noted(join, join.whole)

    def reads(self, variable: VariableOfParts) -> list[tf.Tensor]:
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
        join_again(self._graph, num_before, list(self._joins.values()))

    def _join(self, variable: VariableOfParts, dtype: tf.DType) -> Join:
        key = (id(variable), dtype)
        if key not in self._joins:
            with self._after_the_layer_before():
                self._joins[key] = Join(variable, variable.joined(dtype))
        return self._joins[key]

    def _noted(self, join: Join, tensor: tf.Tensor) -> tf.Tensor:
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


def total(gradients: list[Any], variable: VariableOfParts) -> Any:
    """Returns the gradient of a variable from those of what was read of it, or None."""
    there = [tf.cast(g, variable.parts[0].dtype) for g in gradients if g is not None]
    slices = [gradient for gradient in there if isinstance(gradient, tf.IndexedSlices)]
    if slices:  # which the strategy refuses, by name
        return slices[0]
    return local_sum(there) if there else None


def told_of_calls(model: keras.Model) -> AbstractContextManager[None]:
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
