"""The variables as one run of a user's step finds and leaves them.

All of them are plain tensors in here, read once: an assignment is seen by what follows in the same
step and by nobody else. Gradients have to come out as for variables nevertheless, so tapes watch
each value that a variable has while they are open.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.precision import Scaling
from tfdist.step.own.run import Run
from tfdist.upstream import keras_model

#: Of variables, by id.
Values = dict[int, Any]


class OwnScope(keras.StatelessScope):
    """A `keras.StatelessScope` that knows what was assigned, and that tapes see through.

    Args:
        values: What variables are when the step begins.
        run: Asked on the way.
        scalings: Of the optimizers that scale their loss, by id.
        trial: Whether variables that are not there yet are zeros, and optimizers that lack theirs
            are noted in `unbuilt`.

    Attributes:
        assigned: The variables that were assigned to.
        pending: Ids of those, until somebody has taken note and discards them.
        by_optimizers: Ids of those that an optimizer assigned to.
        results: What metrics returned.
        added_losses: What layers added, each with the layer.
        unbuilt: Optimizers, each with the variables that it was to change.
    """

    def __init__(
        self,
        values: list[tuple[keras.Variable, tf.Tensor]],
        run: Run,
        scalings: Mapping[int, Scaling],
        trial: bool = False,
    ) -> None:
        super().__init__(values)
        self.state_mapping: Values
        self.run, self.scalings, self._trial = run, scalings, trial
        self.assigned: dict[int, keras.Variable] = {}
        self.pending: set[int] = set()
        self.by_optimizers: set[int] = set()
        self.results: list[Any] = []
        self.added_losses: list[tuple[keras.Layer, Any]] = []
        self.unbuilt: list[tuple[keras.optimizers.Optimizer, list[keras.Variable]]] = []
        self._known = {id(v): v for v, _ in values}
        self.in_optimizer = self._in_result = False
        self._open: list[tf.GradientTape] = []
        self._versions: Any = weakref.WeakKeyDictionary()
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @staticmethod
    def current() -> OwnScope | None:
        """Returns the scope that this thread is in."""
        scope = keras_model.stateless_scope()
        return scope if isinstance(scope, OwnScope) else None

    def get_current_value(self, variable: keras.Variable) -> Any:
        if self._trial and id(variable) not in self.state_mapping:
            self._known[id(variable)] = variable
            self._set(variable, tf.zeros(variable.shape, variable.dtype))
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if self._graph not in (None, tf.compat.v1.get_default_graph()):
            raise UnsupportedModelError(
                f"The step assigns to {variable.path!r} inside of a tf.cond or a loop of the "
                "graph, which no copy outside of it would see: choose the value by tf.where, and "
                "assign it in Python's own control flow."
            )
        self.assigned[id(variable)] = variable
        self.pending.add(id(variable))
        self._known[id(variable)] = variable
        if self.in_optimizer:
            self.by_optimizers.add(id(variable))
        # No gradient flows through the assignment to a variable.
        self._set(variable, tf.stop_gradient(value))

    def _set(self, variable: keras.Variable, value: tf.Tensor) -> None:
        self.state_mapping[id(variable)] = value
        for tape in self._open:
            self._watch(tape, id(variable))

    def opened(self, tape: tf.GradientTape) -> None:
        """Lets a tape that begins to record watch the variables."""
        self._open.append(tape)
        self._versions.setdefault(tape, {})
        for key in self._known:
            self._watch(tape, key)

    def closed(self, tape: tf.GradientTape) -> None:
        """Forgets a tape that records no more."""
        self._open.remove(tape)

    def _watch(self, tape: tf.GradientTape, key: int) -> None:
        value = self.state_mapping[key]
        if self._known[key].trainable and value.dtype.is_floating:
            tape.watch(value)
            self._versions[tape].setdefault(key, []).append(value)

    def watched(self, tape: tf.GradientTape, variable: keras.Variable) -> list[Any]:
        """Returns all values of a variable that a tape has seen: a gradient is of their sum."""
        return self._versions[tape].get(id(variable)) or [variable.value]

    def is_inside(self, tape: tf.GradientTape) -> bool:
        """Tells whether another tape records what is done with this one."""
        return any(other is not tape for other in self._open)

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        """Within it, an optimizer assigns."""
        self.in_optimizer = True
        yield
        self.in_optimizer = False

    def either(
        self, condition: Any, when_true: Callable[[], Any], when_false: Callable[[], Any]
    ) -> Any:
        """A `cond` whose branches may assign: both are computed, and one is chosen."""
        values = self.state_mapping
        before = dict(values)
        out_true, if_true = when_true(), dict(values)
        values.update(before)
        out_false = when_false()
        for key, new in if_true.items():
            values[key] = new if new is values[key] else tf.where(condition, new, values[key])
        return keras.tree.map_structure(
            lambda a, b: None if a is None else tf.where(condition, a, b), out_true, out_false
        )

    def result(self, metric: keras.Metric, compute: Callable[[], Any]) -> Any:
        """Returns the result of a metric; those inside of it are part of its own."""
        if self._in_result:
            return compute()
        self._in_result = True
        found = self.run.result(self, metric, compute)
        self._in_result = False
        self.results += tf.nest.flatten(found)
        return found
