"""A user's step run once outside of any graph, from which no variable changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.precision import Scaling
from tfdist.step import batch_norm
from tfdist.step.own import draws
from tfdist.step.own.hooks import hooked
from tfdist.step.own.run import OwnRows, Run
from tfdist.step.own.scope import OwnScope
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_model, keras_optimizers
from tfdist.upstream.keras_losses import losses_of_one_device
from tfdist.upstream.tensorflow import variables_assigned_by

#: A user's `train_step` or `test_step`.
StepFn = Callable[[Any], Any]


def build(model: keras.Model, strategy: Strategy, name: str, batch: Any) -> list[keras.Variable]:
    """Creates what a step uses: weights, states of metrics and of each optimizer that it applies.

    Nothing but the step knows all of them: a GAN has no `call`, and two optimizers.

    Args:
        model: In the strategy's scope.
        strategy: Whose scope that is.
        name: Of the model's method that is the step.
        batch: The first global one.

    Returns:
        All variables that the step is known to be able to change.

    Raises:
        ConfigurationError: An optimizer was created elsewhere.
        UnsupportedModelError: The step assigns to a `tf.Variable`.
    """
    with strategy.scope():
        values = [(v, tf.convert_to_tensor(v)) for v in _variables_of(model)]
        scope, _ = tried(model, getattr(model, name), batch, OwnRows(), {}, values)
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
                f"The optimizer {optimizer.name!r} was created outside of build_model, so that its "
                "variables are not on the replicas: create it inside."
            )


def tried(
    model: keras.Model,
    step: StepFn,
    rows: Any,
    run: Run,
    scalings: Mapping[int, Scaling],
    values: list[tuple[keras.Variable, tf.Tensor]],
) -> tuple[OwnScope, Any]:
    """Runs a step on rows; returns what became of the variables, and the logs."""
    scope = OwnScope(values, run, scalings, trial=True)
    with (
        scope,  # left last: variables that were made in it then get their values
        hooked(model),
        losses_of_one_device(),
        _moments_that_rest(model),
        draws.alike_for_all_rows(),
        variables_assigned_by(_refused),
    ):
        return scope, step(rows)


def _refused(variable: Any, *_: Any, **__: Any) -> None:
    raise UnsupportedModelError(
        f"The step assigns to the tf.Variable {getattr(variable, 'name', '')!r}, of which replicas "
        "would write different values: make it a Keras one, by self.add_weight(trainable=False)."
    )


@contextmanager
def _moments_that_rest(model: keras.Model) -> Iterator[None]:
    """BatchNorm with moving moments: its own are per share, or exchanged, as the trainer says."""
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


def shaken(
    model: keras.Model, known: Sequence[keras.Variable], metrics: set[int], start: float
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns values to try a step from: near the variables', but none of them zero.

    What is zero tells nothing of how it adds up. BatchNorm's statistics stay as they are.

    Args:
        model: Whose variables these are.
        known: All that its step may change.
        metrics: Ids of those of its metrics.
        start: The value of those.
    """
    numbers = np.random.default_rng(0)
    layers = batch_norm.layers_of(model)
    resting = {id(v) for layer in layers for v in layer.non_trainable_variables}
    own = {id(v) for v in model.variables} - resting
    values = []
    for variable in known:
        value = tf.convert_to_tensor(variable)
        if id(variable) in metrics:
            value = tf.cast(tf.fill(value.shape, start), value.dtype)
        elif id(variable) in own and value.dtype.is_floating:
            size = 0.05 * tf.math.reduce_std(tf.cast(value, tf.float32)) + 0.01
            noise = tf.cast(numbers.normal(size=value.shape), tf.float32) * size
            value += tf.cast(noise, value.dtype)
        values.append((variable, value))
    return values
