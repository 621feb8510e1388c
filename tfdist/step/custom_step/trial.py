"""A trial run of a custom step, outside of any graph, that changes no variable.

During a trial, random numbers do not distinguish rows: every draw is one row, repeated, and the
same for half of the rows as for all of them. So the reductions of a step can be inferred even
though it draws random numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.precision import Scaling
from tfdist.step import batch_norm
from tfdist.step.custom_step.scope import (
    CustomStepScope,
    LocalRun,
    StepRun,
    patched_for_custom_step,
)
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_model, keras_optimizers
from tfdist.upstream.keras_losses import losses_of_one_device
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow import variables_assigned_by

#: A `train_step` or `test_step` of a model.
StepFn = Callable[[Any], Any]


def build(model: keras.Model, strategy: Strategy, name: str, batch: Any) -> list[keras.Variable]:
    """Creates what a step uses: weights, states of metrics, and of each optimizer that it applies.

    Only the step itself knows all of them: a GAN has no `call`, and two optimizers.

    Args:
        model: In the strategy's scope.
        strategy: The strategy.
        name: Name of the model's method that is the step.
        batch: The first global batch.

    Returns:
        All variables that the step may change.

    Raises:
        ConfigurationError: An optimizer was created outside of the scope.
        UnsupportedModelError: The step assigns to a `tf.Variable`.
    """
    with strategy.scope():
        values = [(v, tf.convert_to_tensor(v)) for v in _variables_of(model)]
        scope, _ = try_step(model, getattr(model, name), batch, LocalRun(), {}, values)
        optimizers = keras_optimizers.optimizers_of(model)
        _check_owned([*optimizers, *(optimizer for optimizer, _ in scope.unbuilt)], strategy)
        for optimizer, variables in scope.unbuilt:
            if not optimizer.built:
                optimizer.build(variables)
    found = [*_variables_of(model), *scope.assigned.values()]
    found += [v for optimizer, _ in scope.unbuilt for v in optimizer.variables]
    return list({id(v): v for v in found}.values())


def _check_owned(optimizers: Sequence[keras.optimizers.Optimizer], strategy: Strategy) -> None:
    for optimizer in optimizers:
        if not all(strategy.owns(v.value) for v in optimizer.variables):
            raise ConfigurationError(
                f"The optimizer {optimizer.name!r} was created outside of build_model, so its "
                "variables are not on the replicas. Create it inside of build_model."
            )


def try_step(
    model: keras.Model,
    step: StepFn,
    rows: Any,
    run: StepRun,
    scalings: Mapping[int, Scaling],
    values: list[tuple[keras.Variable, tf.Tensor]],
) -> tuple[CustomStepScope, Any]:
    """Runs a step on rows; returns the scope with the values of variables, and the logs."""
    scope = CustomStepScope(values, run, scalings, trial=True)
    with (
        scope,  # exited last: only then new variables get their initial values
        patched_for_custom_step(model),
        losses_of_one_device(),
        _fixed_moments(model),
        _draws_alike_for_all_rows(),
        variables_assigned_by(_refused),
    ):
        return scope, step(rows)


def _refused(variable: Any, *_: Any, **__: Any) -> None:
    raise UnsupportedModelError(
        f"The step assigns to the tf.Variable {getattr(variable, 'name', '')!r}, to which replicas "
        "would write different values. Create a Keras variable with "
        "self.add_weight(trainable=False) instead."
    )


@contextmanager
def _fixed_moments(model: keras.Model) -> Iterator[None]:
    """Lets BatchNorm use its moving moments, which do not depend on the rows."""
    with ExitStack() as stack:
        for layer in batch_norm.layers_of(model):

            def moving(inputs: Any, mask: Any, layer: Any = layer) -> tuple[Any, Any]:
                moments = layer.moving_mean, layer.moving_variance
                return tuple(tf.cast(moment, inputs.dtype) for moment in moments)

            stack.enter_context(keras_model.moments_taken_by(layer, moving))
        yield


def _variables_of(model: keras.Model) -> list[keras.Variable]:
    found = [*model.variables, keras_model.ensured_global_generator().state]
    for part in (*keras_model.metrics_of(model), *keras_optimizers.optimizers_of(model)):
        found += part.variables
    return found


def perturbed(
    model: keras.Model, known: Sequence[keras.Variable], metrics: set[int], start: float
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns values for a trial: close to those of the variables, but not zero.

    From a value of zero, no reduction can be inferred. BatchNorm's statistics are not changed.

    Args:
        model: The model.
        known: All variables that its step may change.
        metrics: Ids of its metrics' variables.
        start: The value for those.
    """
    numbers = np.random.default_rng(0)
    layers = batch_norm.layers_of(model)
    statistics = {id(v) for layer in layers for v in layer.non_trainable_variables}
    weights = {id(v) for v in model.variables} - statistics
    values = []
    for variable in known:
        value = tf.convert_to_tensor(variable)
        if id(variable) in metrics:
            value = tf.cast(tf.fill(value.shape, start), value.dtype)
        elif id(variable) in weights and value.dtype.is_floating:
            size = 0.05 * tf.math.reduce_std(tf.cast(value, tf.float32)) + 0.01
            noise = tf.cast(numbers.normal(size=value.shape), tf.float32) * size
            value += tf.cast(noise, value.dtype)
        values.append((variable, value))
    return values


_STATELESS = ("stateless_normal", "stateless_uniform", "stateless_truncated_normal")


@contextmanager
def _draws_alike_for_all_rows() -> Iterator[None]:
    """Patches random functions to draw equal rows; the n-th draw is always the same."""
    drawn = 0

    def stateful(function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(shape: Any, *args: Any, seed: Any = None, **options: Any) -> tf.Tensor:
            nonlocal drawn
            drawn += 1
            names = ("minval", "maxval") if function is uniform else ("mean", "stddev")
            return function(shape, (17, drawn), **_by_name(names, args), **options)

        return draw

    normal, uniform, truncated = (_one_row(getattr(tf.random, name)) for name in _STATELESS)
    instead: list[tuple[Any, str, Any]] = [
        *zip([tf.random] * 3, _STATELESS, (normal, uniform, truncated), strict=True),
        (tf.random, "normal", stateful(normal)),
        (tf.random, "uniform", stateful(uniform)),
        (tf.random, "truncated_normal", stateful(truncated)),
        (tf.random, "shuffle", lambda value, *args, **options: value),
        (tf.random.experimental, "stateless_shuffle", lambda value, *args, **options: value),
        (tf.random, "stateless_categorical", _most_likely),
        (tf.random, "categorical", _most_likely),
        (tf.nn.experimental, "stateless_dropout", functools.partial(_dropout, uniform)),
        (tf.nn, "dropout", lambda x, rate, *_, **__: _dropout(uniform, x, rate, (17, 0))),
    ]
    with ExitStack() as stack:
        for owner, name, function in instead:
            stack.enter_context(replaced(owner, name, function))
        yield


def _by_name(names: tuple[str, ...], given: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((*names, "dtype"), given, strict=False))


def _one_row(function: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Returns a function that draws one row and repeats it."""

    def draw(shape: Any, seed: Any, *args: Any, **options: Any) -> tf.Tensor:
        shape = tf.cast(tf.convert_to_tensor(shape), tf.int32)
        one = tf.concat([tf.minimum(shape[:1], 1), shape[1:]], 0)
        return tf.broadcast_to(function(one, seed, *args, **options), shape)

    return draw


def _most_likely(logits: tf.Tensor, num_samples: int, *args: Any, **options: Any) -> tf.Tensor:
    dtype = options.get("dtype", tf.int64)
    return tf.repeat(tf.argmax(logits, -1, dtype)[:, None], num_samples, 1)


def _dropout(uniform: Any, x: tf.Tensor, rate: Any, seed: Any, *_: Any, **__: Any) -> tf.Tensor:
    kept = uniform(tf.shape(x), seed, dtype=tf.float32) >= tf.cast(rate, tf.float32)
    return tf.where(kept, x / tf.cast(1 - rate, x.dtype), tf.zeros_like(x))


def flat_logs(logs: Any) -> dict[str, Any]:
    """Returns the results of a step as Keras logs them, with nested dictionaries flattened.

    Raises:
        UnsupportedModelError: They are not a dictionary of numbers.
    """
    found: dict[str, Any] = {}
    for name, value in (logs or {}).items() if isinstance(logs or {}, dict) else [("", logs)]:
        if isinstance(value, dict):
            found |= flat_logs(value)
            continue
        if not name or not np.size(getattr(value, "shape", ())) == 0:
            raise UnsupportedModelError(
                f"The step returns {name or type(value).__name__!r}, which is not a number. Return "
                "a dictionary of scalars or of results of metrics."
            )
        found[name] = value
    return found
