"""Creates what a model still lacks, once the shapes of the data are known, and checks it."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError, DataError, OutOfMemoryError, UnsupportedModelError
from tfdist.model_setup import mismatch
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_model, keras_optimizers


def check_trainable(model: keras.Model) -> None:
    """Refuses a model that lacks what a step needs.

    Raises:
        ConfigurationError: The model is not compiled.
    """
    steps = (type(model).train_step, type(model).test_step)
    own = steps != (keras.Model.train_step, keras.Model.test_step)
    if not model.compiled or (model.optimizer is None and not own):
        raise ConfigurationError(
            "The model is not compiled: call model.compile(optimizer=..., loss=...) inside "
            "build_model."
        )


def weights(model: keras.Model, strategy: Strategy, element_spec: Any) -> None:
    """Creates the weights that are still missing from the shapes of the data.

    Args:
        model: In the strategy's scope.
        strategy: Whose scope that is.
        element_spec: `tf.TensorSpec`s of a global batch.

    Raises:
        UnsupportedModelError: The model cannot be built from shapes.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    # One without a call of its own is never built: its step calls its layers.
    has_call = type(model).call is not keras.Model.call
    layers = keras_model.flatten_layers(model)
    if all(layer.built for layer in layers if has_call or layer is not model):
        return
    try:
        symbolic = keras.tree.map_structure(_symbolic, x)
        with strategy.scope():
            keras_model.build_by_shapes(model, symbolic)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be built from the data's shapes {mismatch.shapes(x)} "
            f"({mismatch.cause(error)}): give it an Input, or call it once in build_model."
        ) from error


def for_training(model: keras.Model, strategy: Strategy, element_spec: Any) -> None:
    """Creates all that training and evaluation need: weights, states of metrics and optimizer.

    Raises:
        UnsupportedModelError: The model cannot be built from shapes.
        DataError: The data do not fit the loss or the metrics.
        OutOfMemoryError: The optimizer's state does not fit the device.
    """
    weights(model, strategy, element_spec)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(element_spec)
    try:
        with strategy.scope():
            if not model.optimizer.built:
                with strategy.making_state(model):
                    keras_optimizers.build_as_fit_does(model)
            keras_model.build_for_training(model, (x, y, sample_weight))
    except tf.errors.ResourceExhaustedError as error:
        raise OutOfMemoryError(mismatch.out_of_memory(error)) from error
    except Exception as error:
        raise DataError(mismatch.describe(model, element_spec, error)) from error


def _symbolic(spec: Any) -> Any:
    return None if spec is None else keras.KerasTensor(spec.shape, spec.dtype.name)
