"""The scope in which a replica runs: keeps assignments aside, and reads sharded variables whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.strategies.sharded.parameter_gather import ParameterGather, total_gradient
from tfdist.upstream.keras_layers import operations_called_through
from tfdist.upstream.keras_model import stateless_scope
from tfdist.upstream.keras_variables import is_joined_to_read, source_of
from tfdist.upstream.tensorflow_graphs import current_graph


class ReplicaScope(keras.StatelessScope):
    """A `keras.StatelessScope` for one replica, which knows what was assigned to.

    Attributes:
        updated: All variables that were assigned to, by id, in the order of their first update.
    """

    #: The error about an assignment in a branch or a loop of the graph.
    in_branch = (
        "{} is assigned in a branch or a loop of the graph (ops.cond, ops.while_loop, ops.scan), "
        "as a seed is by a draw. Assign it before or after, and draw seeds before "
        "(seed_generator.next())."
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.updated: dict[int, keras.Variable] = {}
        self._graph = current_graph()

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Keeps the new value of a variable in this scope.

        As for a variable of TensorFlow, no gradient flows through the assignment.

        Raises:
            UnsupportedModelError: A branch or loop of the graph assigns the value, which is not
                known or does not hold outside.
        """
        variable, value = update
        if self._graph not in (None, current_graph()):
            raise UnsupportedModelError(self.in_branch.format(repr(variable.path)))
        if keras.backend.is_float_dtype(variable.dtype):
            value = tf.stop_gradient(value)
        self.updated[id(variable)] = variable
        super().add_update((variable, value))


class Scope(ReplicaScope):
    """The scope of a forward pass, in which sharded variables are read whole.

    Attributes:
        sums: Ids of metrics' variables, which start at zero and are summed over the replicas.
        alike: For variables that every replica updates from the full batch, by id: whether it has
            updated them from its rows before.
    """

    def __init__(self, *args: Any, bucket_bytes: int | str | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._bucket_bytes = bucket_bytes
        self.sums: frozenset[int] = frozenset()
        self.alike: dict[int, bool] = {}
        self._tape: tf.GradientTape | None = None

    @functools.cached_property
    def gather(self) -> ParameterGather:
        """Gathers sharded variables."""
        return ParameterGather(self._graph, self._tape, self._bucket_bytes)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if "gather" in vars(self) and exception[:1] == (None,):
            self.gather.finish()

    @contextmanager
    def recorded(self) -> Iterator[tf.GradientTape]:
        """Returns a context with a tape that also watches gathered variables."""
        with tf.GradientTape() as self._tape:
            yield self._tape

    def gradients(
        self, compute: Callable[[list], list], variables: Sequence[keras.Variable]
    ) -> list:
        """Returns the gradient of each variable, or None where there is none.

        Args:
            compute: Returns the gradients of sources. Those of sharded variables are lists.
            variables: Plain or sharded.
        """
        sources: list[Any] = []
        for variable in variables:
            if (new := self.assigned(variable)) is not None:  # by a layer
                sources.append(new)
            elif is_joined_to_read(variable):
                sources.append(self.gather.reads(variable))  # all tensors that were read of it
            else:
                sources.append(source_of(variable))
        if "gather" not in vars(self):
            return compute(sources)
        with self.gather.backward():
            gradients = compute(sources)
        return [
            total_gradient(gradient, variable) if isinstance(gradient, list) else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns a variable's value in this scope; None if that is the value outside of it."""
        value = self.assigned(variable)
        if value is None and is_joined_to_read(variable):
            return self.gather.read(variable)
        return value

    def assigned(self, variable: keras.Variable) -> Any:
        """Returns the value that was assigned to a variable in this scope, or None."""
        return super().get_current_value(variable)

    def whole(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns a sharded variable gathered in its own dtype; None if it is not sharded."""
        return self.gather.whole(variable) if is_joined_to_read(variable) else None

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        variable, value = update[0], self.assigned(update[0])
        is_float = keras.backend.is_float_dtype(variable.dtype)
        if self._tape is not None and variable.trainable and is_float:
            self._tape.watch(value)

    def note_alike(self, before: dict[int, Any], is_first: tf.Tensor) -> None:
        """Notes the updates that a loss of the full batch has made, the same on every replica.

        Args:
            before: Values of variables before the loss, by id.
            is_first: Whether this replica is the first one, which alone counts them in metrics.
        """
        for key, variable in list(self.updated.items()):
            new, old = self.assigned(variable), before.get(key)
            if new is None or new is old:
                continue
            if key in self.sums:
                self.add_update((variable, tf.where(is_first, new, old)))
            else:
                self.alike.setdefault(key, old is not None)


def layer_inputs_noted() -> AbstractContextManager[None]:
    """Returns a context in which gathers of sharded variables know the inputs of layers."""
    return operations_called_through(_note_inputs)


def _note_inputs(call: Any, operation: Any, *args: Any, **options: Any) -> Any:
    scope = stateless_scope()
    if isinstance(scope, Scope):
        scope.gather.enter((args, options))
    return call(operation, *args, **options)
