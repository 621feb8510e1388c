"""Creates the model in the scope of a strategy, and checks that replicas can train it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.src import backend

from tfdist import precision
from tfdist.errors import ConfigurationError, DataError, UnsupportedModelError
from tfdist.model_setup import mismatch
from tfdist.model_setup.rebuild import compile_alike, rebuild
from tfdist.strategies.base import Strategy

#: A function that builds and compiles a model, or a compiled model.
BuildModel: TypeAlias = "Callable[[], keras.Model] | keras.Model"


def create(
    source: BuildModel,
    strategy: Strategy,
    policy: str | None = None,
    loss_scale: precision.LossScale | None = None,
) -> keras.Model:
    """Returns a model whose variables belong to the strategy.

    Args:
        source: A function that builds and compiles a model, or a compiled model to rebuild.
        strategy: In whose scope the model is made.
        policy: Name of the dtype policy to build with; None: as the function builds it.
        loss_scale: How the loss is scaled; None: dynamically for the float16 policies.

    Raises:
        ConfigurationError: A precision for a model that is already built, or no model.
        UnsupportedModelError: A model that cannot be rebuilt from its configuration.
    """
    if isinstance(source, keras.Model):
        if policy is not None:
            raise ConfigurationError(
                f"precision={policy!r} came with a model that is already built: pass the "
                "function that builds it, or build it under that dtype policy."
            )
        model = _rebuild_in(strategy, source)
    else:
        with strategy.scope(), precision.policy(policy):
            model = source()
        if not isinstance(model, keras.Model):
            raise ConfigurationError(
                f"build_model returned {type(model).__name__}, expected a compiled keras.Model."
            )
        if not all(strategy.owns(v.value) for v in model.variables):
            warnings.warn(
                "build_model returned a model that was built before, outside the strategy's "
                "scope: it is rebuilt there with its weights.",
                stacklevel=3,
            )
            model = _rebuild_in(strategy, model)
    adopt(model, strategy, policy, loss_scale)
    return model


def adopt(
    model: keras.Model,
    strategy: Strategy,
    policy: str | None,
    loss_scale: precision.LossScale | None,
) -> None:
    """Makes what `compile` brought the strategy's own: after `create`, or a later `compile`.

    An optimizer or metrics that were created outside the scope are created again in it.

    Raises:
        ConfigurationError: The optimizer is another model's, or exchanges gradients by itself.
    """
    if not model.compiled or model.optimizer is None:
        return
    _claim_optimizer(model)
    with strategy.scope(), precision.policy(policy):
        made = model.optimizer.variables + model.metrics_variables
        if not all(strategy.owns(v.value) for v in made):
            warnings.warn(
                "The model was compiled outside the strategy's scope: its optimizer and metrics "
                "are created again inside, as trainer.model.optimizer and .metrics.",
                stacklevel=4,
            )
            compile_alike(model, model)
        precision.with_loss_scale(model, loss_scale, policy)


def _claim_optimizer(model: keras.Model) -> None:
    """Refuses an optimizer that another model has: its state is about one set of weights."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if "_tfdist_exchange" in vars(optimizer):
        raise ConfigurationError(
            "The optimizer is a tfdist.horovod.DistributedOptimizer, but the Trainer exchanges "
            "gradients itself: compile the model with the plain optimizer."
        )
    owner = optimizer.__dict__.get("_tfdist_owner", lambda: None)()
    known = {id(v) for v in optimizer._trainable_variables} if optimizer.built else None
    fits = known is None or all(id(v) in known for v in model.trainable_variables)
    if owner not in (None, model) or not fits:
        raise ConfigurationError(
            "The model's optimizer already belongs to another model or Trainer, whose weights its "
            "state is about: create the optimizer inside build_model."
        )
    optimizer.__dict__["_tfdist_owner"] = weakref.ref(model)


def _rebuild_in(strategy: Strategy, model: keras.Model) -> keras.Model:
    """Rebuilds a model in a strategy's scope, where another's variables cannot be read."""
    if any(isinstance(v.value, tf.distribute.DistributedValues) for v in model.variables):
        model = rebuild(model)
    with strategy.scope():
        return rebuild(model)


def check_trainable(model: keras.Model) -> None:
    """Refuses what the step cannot honour.

    Raises:
        ConfigurationError: The model is not compiled.
        UnsupportedModelError: It brings a step of its own.
    """
    if not model.compiled or model.optimizer is None:
        raise ConfigurationError(
            "The model is not compiled: call model.compile(optimizer=..., loss=...) inside "
            "build_model."
        )
    for step in ("train_step", "test_step"):
        if getattr(type(model), step) is not getattr(keras.Model, step):
            raise UnsupportedModelError(
                f"{type(model).__name__} overrides {step}, which would compute on one share and "
                "bypass the exchange: override compute_loss, compute_metrics or call instead."
            )


def build_weights(model: keras.Model, strategy: Strategy, element_spec: Any) -> None:
    """Creates the weights that are still missing from the shapes of the data.

    Args:
        model: In the strategy's scope.
        strategy: Whose scope that is.
        element_spec: `tf.TensorSpec`s of a global batch.

    Raises:
        UnsupportedModelError: The model cannot be built from shapes.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    if all(layer.built for layer in model._flatten_layers()):
        return
    try:
        symbolic = keras.tree.map_structure(_symbolic, x)
        with strategy.scope():
            backend.compute_output_spec(model, symbolic, training=False)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be built from the data's shapes {mismatch.shapes(x)} "
            f"({mismatch.cause(error)}): give it an Input, or call it once in build_model."
        ) from error


def build(model: keras.Model, strategy: Strategy, element_spec: Any) -> None:
    """Creates what is still missing to train or evaluate: weights, metrics, optimizer.

    Raises:
        UnsupportedModelError: The model cannot be built from shapes.
        DataError: The data do not fit the loss or the metrics.
    """
    build_weights(model, strategy, element_spec)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(element_spec)
    try:
        with strategy.scope():
            model._symbolic_build(data_batch=(x, y, sample_weight))
    except Exception as error:
        raise DataError(mismatch.describe(model, element_spec, error)) from error


def _symbolic(spec: Any) -> Any:
    return None if spec is None else keras.KerasTensor(spec.shape, spec.dtype.name)
