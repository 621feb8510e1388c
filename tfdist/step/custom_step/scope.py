"""What a user's step asks, in a run of it, that depends on more than its own rows.

The variables as one run of a user's step finds and leaves them.

All of them are plain tensors in here, read once: an assignment is seen by what follows in the same
step and by nobody else. Gradients have to come out as for variables nevertheless, so tapes watch
each value that a variable has while they are open.

While a custom step runs, `patched_for_custom_step` routes its tapes, optimizers, metrics, and seed
generators through the scope. Code that runs outside of a `CustomStepScope` is not affected.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.precision import Scaling
from tfdist.upstream import keras_losses, keras_model, keras_optimizers
from tfdist.upstream.patching import replaced


class StepRun(Protocol):
    """Who answers it."""

    def gradients(self, compute: Callable[[], list], inner: bool) -> list:
        """Returns the gradients of variables.

        Args:
            compute: Takes those of this run's rows.
            inner: Whether another tape records, so that the gradients are part of a loss.
        """

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        """Returns the result of a metric, which `compute` takes from the values in the scope."""

    def seed(self, drawn: tf.Tensor) -> tf.Tensor:
        """Returns the seed with which to draw where a generator gave this one."""


class LocalRun:
    """A `StepRun` whose rows are all there are: the whole batch, or a trial."""

    def gradients(self, compute: Callable[[], list], inner: bool) -> list:
        del inner
        return compute()

    def result(
        self, scope: CustomStepScope, metric: keras.Metric, compute: Callable[[], Any]
    ) -> Any:
        del scope, metric
        return compute()

    def seed(self, drawn: tf.Tensor) -> tf.Tensor:
        return drawn


#: Of variables, by id.
Values = dict[int, Any]


class CustomStepScope(keras.StatelessScope):
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
        run: StepRun,
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
    def current() -> CustomStepScope | None:
        """Returns the scope that this thread is in."""
        scope = keras_model.stateless_scope()
        return scope if isinstance(scope, CustomStepScope) else None

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


_Tape = tf.GradientTape
_enter, _exit, _watch, _gradient = _Tape.__enter__, _Tape.__exit__, _Tape.watch, _Tape.gradient
_next = keras.random.SeedGenerator.next


@contextmanager
def patched_for_custom_step(model: keras.Model) -> Iterator[None]:
    """Runs steps of a model inside."""
    with ExitStack() as stack:
        stack.enter_context(keras_optimizers.optimizers_in_scope(_apply, _cond))
        stack.enter_context(keras_losses.added_losses_in(_added_losses))
        for owner, name, function in (
            (_Tape, "__enter__", _entered),
            (_Tape, "__exit__", _exited),
            (_Tape, "watch", _watched),
            (_Tape, "gradient", _gradients),
            (keras.random.SeedGenerator, "next", _seed),
        ):
            stack.enter_context(replaced(owner, name, function))
        for metric in keras_model.metrics_of(model):
            plain = functools.partial(type(metric).result, metric)
            stack.enter_context(
                replaced(metric, "result", functools.partial(_result, metric, plain))
            )
        yield


def _added_losses() -> list[tuple[keras.Layer, Any]] | None:
    scope = CustomStepScope.current()
    return None if scope is None else scope.added_losses


def _entered(tape: tf.GradientTape) -> tf.GradientTape:
    _enter(tape)
    if scope := CustomStepScope.current():
        scope.opened(tape)
    return tape


def _exited(tape: tf.GradientTape, *exception: Any) -> None:
    if scope := CustomStepScope.current():
        scope.closed(tape)
    _exit(tape, *exception)


def _watched(tape: tf.GradientTape, tensors: Any) -> None:
    if CustomStepScope.current():
        tensors = [
            t.value if isinstance(t, keras.Variable) else t for t in tf.nest.flatten(tensors)
        ]
    _watch(tape, tensors)


def _gradients(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
    scope, flat = CustomStepScope.current(), tf.nest.flatten(sources)
    variables = [i for i, source in enumerate(flat) if isinstance(source, keras.Variable)]
    if scope is None or not variables:
        return _gradient(tape, target, sources, *args, **options)
    values = [scope.watched(tape, s) if i in variables else [s] for i, s in enumerate(flat)]
    others: dict[int, Any] = {}

    def compute() -> list:
        found = [_sum(each) for each in _gradient(tape, target, values, *args, **options)]
        others.update(enumerate(found))
        return [found[i] for i in variables]

    taken = scope.run.gradients(compute, scope.is_inside(tape))
    gradients = others | dict(zip(variables, taken, strict=True))
    return tf.nest.pack_sequence_as(sources, [gradients[i] for i in range(len(flat))])


def _sum(gradients: Sequence[Any]) -> Any:
    """The gradient of a variable is that of all values it had."""
    found = [g for g in gradients if g is not None]
    return found[0] if len(found) == 1 else tf.add_n(found) if found else None


def _seed(generator: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    drawn, scope = _next(generator, ordered), CustomStepScope.current()
    return drawn if scope is None else scope.run.seed(drawn)


def _result(metric: keras.Metric, plain: Callable[[], Any]) -> Any:
    scope = CustomStepScope.current()
    return plain() if scope is None else scope.result(metric, plain)


def _apply(
    plain: Callable[..., None], optimizer: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """`Optimizer.apply`, and that of a `LossScaleOptimizer`.

    Raises:
        UnsupportedModelError: The optimizer relies on `value` being the variable, not its value.
    """
    scope = CustomStepScope.current()
    if scope is None:
        plain(optimizer, grads, trainable_variables)
    elif isinstance(optimizer, keras.optimizers.ScheduleFreeAdamW):
        raise UnsupportedModelError(
            "ScheduleFreeAdamW reads a moment after it has changed it, which values in a step of "
            "one's own do not follow: use another optimizer, or Keras's own train_step."
        )
    elif not optimizer.built:
        scope.unbuilt.append((optimizer, list(trainable_variables or ())))
    elif id(optimizer) in scope.scalings:
        _apply_scaled(scope, optimizer, list(grads), trainable_variables)
    else:
        with scope.optimizing():
            plain(optimizer, grads, trainable_variables)


def _apply_scaled(scope: CustomStepScope, optimizer: Any, grads: list, variables: Any) -> None:
    """As Keras's: gradients that are not finite change nothing but the scale."""
    scaling = scope.scalings[id(optimizer)]
    unscaled = scaling.unscale(grads)
    finite = scaling.overflows(unscaled) == 0
    scope.either(finite, lambda: optimizer.inner_optimizer.apply(unscaled, variables), lambda: None)
    with scope.optimizing():
        scaling.move(finite)


def _cond(plain: Callable[..., Any], condition: Any, when_true: Any, when_false: Any) -> Any:
    scope = CustomStepScope.current()
    choose = plain if scope is None or not scope.in_optimizer else scope.either
    return choose(condition, when_true, when_false)
