"""Keras and TensorFlow as a step of one's own finds them: what it asks goes to its scope.

Entered outside of the replicas, which are traced in turns; what is called outside of an `OwnScope`
is as it always was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.step.own.scope import OwnScope
from tfdist.upstream import keras_losses, keras_model, keras_optimizers
from tfdist.upstream.patching import replaced

_Tape = tf.GradientTape
_enter, _exit, _watch, _gradient = _Tape.__enter__, _Tape.__exit__, _Tape.watch, _Tape.gradient
_next = keras.random.SeedGenerator.next


@contextmanager
def hooked(model: keras.Model) -> Iterator[None]:
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
    scope = OwnScope.current()
    return None if scope is None else scope.added_losses


def _entered(tape: tf.GradientTape) -> tf.GradientTape:
    _enter(tape)
    if scope := OwnScope.current():
        scope.opened(tape)
    return tape


def _exited(tape: tf.GradientTape, *exception: Any) -> None:
    if scope := OwnScope.current():
        scope.closed(tape)
    _exit(tape, *exception)


def _watched(tape: tf.GradientTape, tensors: Any) -> None:
    if OwnScope.current():
        tensors = [
            t.value if isinstance(t, keras.Variable) else t for t in tf.nest.flatten(tensors)
        ]
    _watch(tape, tensors)


def _gradients(tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
    scope, flat = OwnScope.current(), tf.nest.flatten(sources)
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
    drawn, scope = _next(generator, ordered), OwnScope.current()
    return drawn if scope is None else scope.run.seed(drawn)


def _result(metric: keras.Metric, plain: Callable[[], Any]) -> Any:
    scope = OwnScope.current()
    return plain() if scope is None else scope.result(metric, plain)


def _apply(
    plain: Callable[..., None], optimizer: Any, grads: Any, trainable_variables: Any = None
) -> None:
    """`Optimizer.apply`, and that of a `LossScaleOptimizer`.

    Raises:
        UnsupportedModelError: The optimizer relies on `value` being the variable, not its value.
    """
    scope = OwnScope.current()
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


def _apply_scaled(scope: OwnScope, optimizer: Any, grads: list, variables: Any) -> None:
    """As Keras's: gradients that are not finite change nothing but the scale."""
    scaling = scope.scalings[id(optimizer)]
    unscaled = scaling.unscale(grads)
    finite = scaling.overflows(unscaled) == 0
    scope.either(finite, lambda: optimizer.inner_optimizer.apply(unscaled, variables), lambda: None)
    with scope.optimizing():
        scaling.move(finite)


def _cond(plain: Callable[..., Any], condition: Any, when_true: Any, when_false: Any) -> Any:
    scope = OwnScope.current()
    choose = plain if scope is None or not scope.in_optimizer else scope.either
    return choose(condition, when_true, when_false)
