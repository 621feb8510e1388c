"""Creates the model in the strategy's scope, and handles later calls of `compile`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist import precision
from tfdist.errors import ConfigurationError, OutOfMemoryError
from tfdist.model_setup import build
from tfdist.model_setup.rebuild import compile_like, rebuild
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_model, keras_optimizers, keras_variables

#: A function that builds and compiles a model, or a compiled model.
BuildModel: TypeAlias = "Callable[[], keras.Model] | keras.Model"

_CONVOLUTIONS = tuple(kind for name, kind in vars(keras.layers).items() if "Conv" in name)


def create(
    source: BuildModel,
    strategy: Strategy,
    policy: str | None = None,
    loss_scale: precision.LossScale | None = None,
    num_rounds: int = 1,
) -> keras.Model:
    """Returns a model whose variables belong to the strategy.

    Args:
        source: A function that builds and compiles a model, or a compiled model to rebuild.
        strategy: The model is made in its scope.
        policy: Name of the dtype policy to build with; None to build with the current one.
        loss_scale: How to scale the loss; None for dynamic scaling with the float16 policies.
        num_rounds: In how many a training step computes its batch.

    Raises:
        ConfigurationError: `source` returned no model, or a dtype policy was given for a model
            that is already built.
        UnsupportedModelError: The model cannot be rebuilt from its configuration.
        OutOfMemoryError: The weights do not fit into the device's memory.
    """

    def uses_xla_by_default(model: keras.Model) -> bool:
        """Whether `jit_compile="auto"` keeps its meaning of plain Keras.

        Replicas and rounds may exchange sums within a step. XLA tunes each convolution for seconds
        on the host, so that the first step of a ResNet-50 takes minutes.
        """
        is_tuned = any(isinstance(x, _CONVOLUTIONS) for x in keras_model.flatten_layers(model))
        return strategy.num_replicas * num_rounds == 1 and not is_tuned

    try:
        with keras_model.use_xla_by_default_if(uses_xla_by_default):
            model = _create(source, strategy, policy, loss_scale)
    except tf.errors.ResourceExhaustedError as error:
        raise OutOfMemoryError(build.out_of_memory_message(error)) from error
    keras_model.keep_xla_by_default_if(model, uses_xla_by_default)
    return model


def _not_a_model(result: object) -> str:
    kind = type(result)
    if _is_of_keras_2(result):
        return (
            f"The model is a {kind.__name__} of tf_keras (Keras 2). Build it with keras (Keras 3), "
            "without TF_USE_LEGACY_KERAS."
        )
    return f"build_model returned {kind.__name__}, expected a compiled keras.Model."


def _is_of_keras_2(source: object) -> bool:
    return any(base.__module__.startswith("tf_keras") for base in type(source).__mro__)


def _create(
    source: BuildModel,
    strategy: Strategy,
    policy: str | None,
    loss_scale: precision.LossScale | None,
) -> keras.Model:
    if _is_of_keras_2(source):  # it can be called, as a function that builds a model
        raise ConfigurationError(_not_a_model(source))
    if isinstance(source, keras.Model):
        if policy is not None:
            raise ConfigurationError(
                f"precision={policy!r} cannot be applied to a model that is already built. Pass "
                "the function that builds it, or build it with that dtype policy."
            )
        with strategy.scope(), strategy.variables.making_weights(), _unchanged_random_state():
            model = rebuild(source)
    else:
        with strategy.scope(), strategy.variables.making_weights(), precision.policy(policy):
            model = source()
        if not isinstance(model, keras.Model):
            raise ConfigurationError(_not_a_model(model))
        if not owns_all(strategy, model.variables):
            warnings.warn(
                "build_model returned a model that was built outside the strategy's scope. It is "
                "rebuilt in the scope, with its weights.",
                stacklevel=4,
            )
            with strategy.scope(), strategy.variables.making_weights(), _unchanged_random_state():
                model = rebuild(model)
    adopt(model, strategy, policy, loss_scale)
    return model


def adopt(
    model: keras.Model,
    strategy: Strategy,
    policy: str | None,
    loss_scale: precision.LossScale | None,
) -> None:
    """Moves optimizer and metrics of `compile` into the strategy's scope.

    An optimizer or metrics that were created outside the scope are created again inside.

    Raises:
        ConfigurationError: The optimizer has state for other weights or synchronizes gradients
            itself, or weights were added outside the scope.
    """
    if not model.compiled or model.optimizer is None:
        return
    if added := [v.path for v in model.variables if not owns_all(strategy, [v])]:
        raise ConfigurationError(
            f"{added[0]} was created outside the strategy's scope. Change the model inside "
            "`with trainer.strategy.scope():`, or create another Trainer with the changed model."
        )
    if "_tfdist_exchange" in vars(keras_optimizers.unwrapped(model.optimizer)):
        raise ConfigurationError(
            "The optimizer is a tfdist.horovod.DistributedOptimizer, but the Trainer synchronizes "
            "gradients itself. Compile the model with the plain optimizer."
        )
    with strategy.scope(), precision.policy(policy), _unchanged_random_state():
        state = model.optimizer.variables + model.metrics_variables
        if not owns_all(strategy, state):
            check_optimizer(model)
            warnings.warn(
                "The model was compiled outside the strategy's scope. Its optimizer and metrics "
                "are created again in the scope, as trainer.model.optimizer and .metrics.",
                stacklevel=4,
            )
            compile_like(model, model)
        precision.with_loss_scale(model, loss_scale, policy)


def owns_all(strategy: Strategy, variables: Iterable[keras.Variable]) -> bool:
    """Returns whether all variables are placed as the strategy's scope would place them."""
    values = (value for v in variables for value in keras_variables.values_of(v))
    return all(map(strategy.variables.owns, values))


def check_optimizer(model: keras.Model) -> None:
    """Checks that the optimizer of `compile` can train a model, as Keras does in its first step.

    Several models may share an optimizer, if it was built for the weights of each.

    Raises:
        ConfigurationError: It has state for other weights.
    """
    optimizer = keras_optimizers.unwrapped(model.optimizer)
    weights = {id(v) for v in keras_optimizers.weights_known_to(optimizer)}
    if optimizer.built and not weights.issuperset(map(id, model.trainable_variables)):
        raise ConfigurationError(
            "The model's optimizer was built for other weights: those of another model, or before "
            "layers were unfrozen. Compile the model with a new optimizer."
        )


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    """Restores the global random state of Python and NumPy after the block.

    Keras draws the seed of each initializer and each random layer that has none from Python's
    generator. Layers that tfdist creates in addition would change the seeds of later ones.
    """
    restore_python, of_numpy = keras_model.python_random_state(), np.random.get_state()
    try:
        yield
    finally:
        restore_python()
        np.random.set_state(of_numpy)
