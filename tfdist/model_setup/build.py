"""Builds the missing parts of a model when the shapes of the data are known.

Errors of Keras and TensorFlow are converted to messages of two lines with cause and fix.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from types import NoneType
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError, DataError, OutOfMemoryError, UnsupportedModelError
from tfdist.replica.program_state import python_state_kept
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_model, keras_optimizers
from tfdist.upstream.patching import replaced


def check_trainable(model: keras.Model) -> None:
    """Checks that a model is compiled and can be trained.

    Raises:
        ConfigurationError: The model is not compiled.
        UnsupportedModelError: A part of it redefines the list of its variables.
    """
    has_custom_step = keras_model.redefined(model, "train_step", "test_step") is not None
    if not model.compiled or (model.optimizer is None and not has_custom_step):
        raise ConfigurationError(
            "The model is not compiled. Call model.compile(optimizer=..., loss=...) inside "
            "build_model."
        )
    keras_optimizers.check_lists_of_variables(model)


def build_weights(model: keras.Model, strategy: Strategy, element_spec: Any) -> None:
    """Creates the weights that are still missing, from the shapes of the data.

    Raises:
        UnsupportedModelError: The model cannot be built from shapes.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    # A model that does not override `call` is never built. Its custom step calls its layers.
    has_call = keras_model.overrides(model, "call")
    layers = keras_model.flatten_layers(model)
    if all(layer.built for layer in layers if has_call or layer is not model):
        return
    try:
        symbolic = keras.tree.map_structure(
            lambda spec: spec and keras.KerasTensor(spec.shape, spec.dtype.name), x
        )
        with strategy.scope(), strategy.variables.making_weights(), python_state_kept():
            keras_model.build_by_shapes(model, symbolic)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be built from the data's shapes {shapes(x)} "
            f"({root_cause(error)}). Give it an Input, or call it once in build_model."
        ) from error


def build_for_training(
    model: keras.Model,
    strategy: Strategy,
    element_spec: Any,
    first_batch: Callable[[], Any] | None = None,
    training: bool = True,
) -> None:
    """Creates weights and the states of metrics and, for training, of the optimizer.

    Args:
        model: A model that was created in the strategy's scope.
        strategy: The strategy.
        element_spec: `tf.TensorSpec`s of a global batch.
        first_batch: Returns the first global batch, for what cannot be built from shapes: metrics
            and losses that only run eagerly, and models of ragged or sparse tensors.
        training: Whether to build the optimizer, which Keras's `evaluate` does not.

    Raises:
        UnsupportedModelError: The model cannot be built from shapes.
        DataError: The data is incompatible with the loss or the metrics.
        OutOfMemoryError: The optimizer's state does not fit into the device's memory.
    """
    build_weights(model, strategy, element_spec)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(element_spec)
    try:
        with strategy.scope(), python_state_kept(model, creates_weights=True):
            if training and not model.optimizer.built:
                with strategy.variables.making_state(model):
                    keras_optimizers.build_as_fit_does(model)
            try:
                with replaced(model.optimizer, "built", True):
                    keras_model.build_for_training(model, (x, y, sample_weight))
            except Exception:
                leaves = tf.nest.flatten(element_spec)
                is_dense = all(isinstance(leaf, (tf.TensorSpec, NoneType)) for leaf in leaves)
                if first_batch is None or (is_dense and not model.run_eagerly):
                    raise
                batch = keras.utils.unpack_x_y_sample_weight(first_batch())
                keras_model.build_eagerly(model, batch)
            keras_optimizers.check_lists_of_variables(model)
    except tf.errors.ResourceExhaustedError as error:
        raise OutOfMemoryError(out_of_memory_message(error)) from error
    except (DataError, UnsupportedModelError):
        raise
    except Exception as error:
        raise DataError(mismatch_message(model, element_spec, error)) from error


def mismatch_message(model: keras.Model, element_spec: Any, error: Exception) -> str:
    """Returns the message for data that is incompatible with the model."""
    if isinstance(error, tf.errors.OpError):  # a label out of range, a corrupt file, ...
        return f"Computing a batch failed: {root_cause(error)}{_user_traceback(error)}"
    x, y, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    outputs = getattr(model, "output_shape", "of unknown shape")
    return (
        f"The data is incompatible with the model: x {shapes(x)}, y {shapes(y)}, outputs "
        f"{outputs}; {root_cause(error)}\n"
        "Check the shapes of the inputs against the model, and of the labels against the loss."
    )


def out_of_memory_message(error: Exception) -> str:
    """Returns the message for a lack of memory, with options that need less."""
    return (
        f"out of memory: {root_cause(error)}\n"
        "Use a smaller --batch-size, --accumulate 2 (two micro-batches, same results), more "
        "devices, --precision mixed_bfloat16, or, if the weights are too large, --strategy sharded."
    )


def shapes(structure: Any) -> Any:
    """Returns the shapes in a structure of tensors or `tf.TensorSpec`s, as tuples."""

    def shape(spec: Any) -> Any:
        if spec is None:
            return None
        return "of unknown rank" if spec.shape.rank is None else tuple(spec.shape)

    return tf.nest.map_structure(shape, structure)


def root_cause(error: Exception) -> str:
    """Returns the line of an error of Keras or TensorFlow with its cause."""
    text = re.sub(r"\x1b\[\d+m|Exception encountered when calling .*", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # An error while a graph runs has its cause right before the name of the node.
    node = next((i for i, line in enumerate(lines) if line.startswith("[[{{node")), 1)
    line = lines[max(node, 1) - 1] if lines else type(error).__name__
    if asserted := re.search(r"assertion failed: \[(.*?)\]", line):
        line = asserted[1]  # the message of an assertion in the data pipeline
    return textwrap.shorten(re.sub(r"^\(\d+\) [A-Z_]+:\s*", "", line), 300, placeholder=" ...")


def _user_traceback(error: Exception) -> str:
    """Returns the user's frames of the traceback if a Python function of a data pipeline failed."""
    _, heading, text = str(error).partition("Traceback (most recent call last):")
    frames = re.findall(r'^  File ".*\n(?:    .*\n)+', text.partition("[[{{node")[0], re.MULTILINE)
    libraries = (*tf.__path__, *keras.__path__)
    users = [frame for frame in frames if not any(f'"{path}/' in frame for path in libraries)]
    return "\n" + "".join(users).rstrip() if heading and users else ""
