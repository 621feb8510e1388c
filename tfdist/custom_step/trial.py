"""A trial run of a custom step, outside of any graph, that changes no variable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.custom_step.scope import (
    CustomStepScope,
    LocalRun,
    patched_for_custom_step,
)
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.patches import batch_norm
from tfdist.rows import refused_assignment
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_model, keras_optimizers
from tfdist.upstream.keras_losses import losses_of_one_device
from tfdist.upstream.random_states import python_state_kept
from tfdist.upstream.tensorflow_runtime import variables_assigned_by

#: A `train_step` or `test_step` of a model.
StepFn = Callable[[Any], Any]


class BuiltStep(NamedTuple):
    """What the trial run of a step showed.

    Attributes:
        variables: All variables that the step may change.
        logs: The shapes of its results, by name.
    """

    variables: list[keras.Variable]
    logs: dict[str, tuple[int, ...]]


def build(model: keras.Model, strategy: Strategy, name: str, batch: Any) -> BuiltStep:
    """Creates what a step uses: weights, states of metrics, and of each optimizer that it applies.

    Only the step itself knows all of them: a GAN has no `call`, and two optimizers.

    Args:
        model: A model that was created in the strategy's scope.
        strategy: The strategy.
        name: Name of the model's method that is the step.
        batch: The first global batch.

    Raises:
        ConfigurationError: An optimizer was created outside of the scope.
        UnsupportedModelError: The step assigns to a `tf.Variable`.
    """
    with strategy.scope():
        values = [(v, tf.convert_to_tensor(v)) for v in _variables_of(model)]
        scope, logs = _try_step(model, getattr(model, name), batch, values)
        optimizers = keras_optimizers.optimizers_of(model)
        _check_owned([*optimizers, *(optimizer for optimizer, _ in scope.unbuilt)], strategy)
        for optimizer, variables in scope.unbuilt:
            if not optimizer.built:
                optimizer.build(variables)
    changed = [*_variables_of(model), *scope.updated.values()]
    changed += [v for optimizer, _ in scope.unbuilt for v in optimizer.variables]
    shapes = {name: tuple(np.shape(value)) for name, value in flat_logs(logs).items()}
    return BuiltStep(list({id(v): v for v in changed}.values()), shapes)


def _check_owned(optimizers: Sequence[keras.optimizers.Optimizer], strategy: Strategy) -> None:
    for optimizer in optimizers:
        if not all(strategy.variables.owns(v.value) for v in optimizer.variables):
            raise ConfigurationError(
                f"The optimizer {optimizer.name!r} was created outside of build_model, so its "
                "variables are not on the replicas. Create it inside of build_model."
            )


def _try_step(
    model: keras.Model, step: StepFn, batch: Any, values: list[tuple[keras.Variable, tf.Tensor]]
) -> tuple[CustomStepScope, Any]:
    """Runs a step; returns the scope with the values of variables, and the logs."""
    scope = CustomStepScope(values, LocalRun(), {}, trial=True)
    with (
        scope,  # exited last: only then new variables get their initial values
        patched_for_custom_step(model),
        losses_of_one_device(),
        batch_norm.fixed_moments(model),
        variables_assigned_by(_refused),
        python_state_kept(model),
    ):
        return scope, step(batch)


def _refused(variable: tf.Variable, *_: Any, **__: Any) -> None:
    raise refused_assignment("step", variable)


def _variables_of(model: keras.Model) -> list[keras.Variable]:
    # Not created before the step uses it: it draws its seed from Python's generator, as do the
    # initializers of weights that the step creates.
    generator = keras_model.global_generator()
    variables = [*model.variables, *([] if generator is None else [generator.state])]
    for part in (*keras_model.metrics_of(model), *keras_optimizers.optimizers_of(model)):
        is_optimizer = isinstance(part, keras.optimizers.Optimizer)
        variables += keras_optimizers.variables_of(part) if is_optimizer else part.variables
    return variables


def flat_logs(logs: Any) -> dict[str, Any]:
    """Returns the results of a step as Keras logs them, with nested dictionaries flattened.

    Raises:
        UnsupportedModelError: They are not a dictionary.
    """
    flat: dict[str, Any] = {}
    for name, value in (logs or {}).items() if isinstance(logs or {}, dict) else [("", logs)]:
        if isinstance(value, dict):
            flat |= flat_logs(value)
            continue
        if not name:
            raise UnsupportedModelError(
                f"The step returns {type(value).__name__!r}. Return a dictionary of its logs."
            )
        flat[name] = value
    return flat
