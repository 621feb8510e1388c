"""Detects models in which the rows of a batch depend on each other: they need full batches.

A layer may subtract the batch's mean, an output may hold the distances between all pairs of rows,
and a number of rows may be hard-coded in the model. Such a model cannot be computed on parts of a
batch. Models that are made of Keras's own layers are known to be row by row. Others are probed on
the first batch: the outputs of a few rows must not change with the other rows in the batch.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.model_setup.build import root_cause
from tfdist.step import batch_norm
from tfdist.step.reductions import ReductionProbe
from tfdist.step.scope import Scope
from tfdist.strategies import batches
from tfdist.strategies.batches import has_rows, num_rows, uneven
from tfdist.upstream import keras_model
from tfdist.upstream.keras_model import flatten_layers
from tfdist.upstream.patching import replaced

logger = logging.getLogger(__name__)

#: Rows that a probe keeps, while it replaces as many others.
_NUM_ROWS = 2

#: Modules whose layers treat each row by itself. Some preprocessing layers do not (MelSpectrogram,
#: MixUp, TextVectorization).
_ROW_BY_ROW = ("keras.src.layers.", "keras.src.models.", "keras.src.applications.")
_UNKNOWN = ("keras.src.layers.preprocessing.", "keras.src.layers.core.lambda_layer")


def full_batch_reason(
    model: keras.Model, first_batch: Callable[[], Any], training: bool
) -> str | None:
    """Returns why a model needs full batches, with the name of the layer; None if it does not.

    Args:
        model: Built.
        first_batch: Returns the first global batch. Called outside of any graph, and only for a
            model that has other layers than Keras's.
        training: Whether the model is called as in training.
    """
    if training and (found := _overwritten_weight(model)):
        return f"{found} is updated with the largest value of the full batch"
    if has_only_row_by_row_layers(model):
        return None
    with tf.init_scope(), ExitStack() as stack:
        batch = first_batch()
        for layer in batch_norm.layers_of(model):  # moments of each replica are documented
            moving = functools.partial(_moving_moments, layer)
            stack.enter_context(keras_model.moments_taken_by(layer, moving))
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        return (
            uneven(batch)
            or _probe_outputs(model, x, training)
            or _probe_reductions(model, x, training)
        )


def has_only_row_by_row_layers(model: keras.Model) -> bool:
    """Tells whether all layers of a model are Keras's own, used in a way that mixes no rows.

    BatchNormalization is one of them, because it is documented to use each replica's moments.
    """
    return all(_is_row_by_row(layer) for layer in flatten_layers(model))


def _is_row_by_row(layer: keras.layers.Layer) -> bool:
    if not _is_of_keras(type(layer)) or getattr(layer, "stateful", False):
        return False
    # A functional model may hold bare operations.
    nodes = getattr(layer, "operations", [])
    if not all(isinstance(node, keras.layers.Layer) for node in nodes):
        return False
    axes = [getattr(layer, name, None) for name in ("axis", "axes")]
    if any(0 in (axis if isinstance(axis, (list, tuple)) else [axis]) for axis in axes):
        return False
    functions = [value for value in vars(layer).values() if _is_function(value)]
    # Functions of tfdist are its patches of Keras's.
    return all(_is_of_keras(function, "keras.src.", "tfdist.") for function in functions)


def _is_of_keras(source: Any, *modules: str) -> bool:
    module = getattr(source, "__module__", None) or ""
    return module.startswith(modules or _ROW_BY_ROW) and not module.startswith(_UNKNOWN)


def _is_function(value: Any) -> bool:
    """Tells whether an attribute of a layer is an activation or another function."""
    return inspect.isroutine(value) or isinstance(value, functools.partial)


def _overwritten_weight(model: keras.Model) -> str | None:
    """Returns a weight whose gradient is its new value: the running maximum of a float8 layer."""
    found = (v.path for v in model.trainable_variables if v.overwrite_with_gradient)
    return next(found, None)


def _moving_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    del mask
    mean, variance = layer.moving_mean, layer.moving_variance
    return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


def _probe_outputs(model: keras.Model, x: Any, training: bool) -> str | None:
    """Compares the outputs of rows beside other rows with their outputs in another batch."""
    kept = min(_NUM_ROWS, int(num_rows(x)) // 2)
    if kept == 0:
        return None
    first, second = batches.take(x, 0, kept), batches.take(x, kept, 2 * kept)
    try:
        # Both ways: the largest value of a batch affects only the rows that do not hold it.
        return _probe_beside(model, first, second, training) or _probe_beside(
            model, second, first, training
        )
    except Exception as error:
        try:
            layer_calls(model, x, training)
        except Exception as broken:
            # The first step raises the same error, with a message about model and data.
            logger.debug("The model cannot be probed: %s", broken)
            return None
        return f"the model takes no other number of rows ({root_cause(error)})"


def _probe_beside(model: keras.Model, some: Any, others: Any, training: bool) -> str | None:
    kept = int(num_rows(some))
    both, twice = _concatenated(some, others), _concatenated(some, some)
    # With as many rows, random layers draw the same numbers. Fewer rows are probed without them.
    return _mixing_layer(model, both, twice, kept, training) or _mixing_layer(
        model, both, some, kept, training=False, shift=1
    )


def _probe_reductions(model: keras.Model, x: Any, training: bool) -> str | None:
    """Returns which added loss or updated state is neither a mean nor a sum over rows."""
    options = {"training": training} if keras_model.takes_training(model) else {}
    try:
        with Scope(collect_losses=True) as scope:
            model(batches.take(x, 0, min(_NUM_ROWS, int(num_rows(x)))), **options)
    except Exception as error:
        # The first step raises the same error, with a message about model and data.
        logger.debug("Added losses and states cannot be probed: %s", error)
        return None
    generator = keras_model.global_generator()
    known = [*keras_model.seeds_of(model), *model.metrics_variables]
    known += [v for layer in batch_norm.layers_of(model) for v in layer.variables]
    known += [] if generator is None else [generator.state]
    states = [v for v in scope.updated.values() if all(v is not other for other in known)]
    probe = ReductionProbe(model, lambda: (x,))
    try:
        if scope.losses:
            probe.loss_reductions(len(scope.losses), training)
        for state in states:
            probe.state_reduction(state)
    except UnsupportedModelError as error:
        return str(error).split(",")[0]
    return None


def _mixing_layer(
    model: keras.Model, batch: Any, other: Any, kept: int, training: bool, shift: int = 0
) -> str | None:
    """Names the layer whose outputs for a batch's first rows change with the rows beside them.

    Args:
        model: Built.
        batch: Inputs.
        other: Inputs that begin with the same rows.
        kept: Number of these rows.
        training: As in `Model.call`.
        shift: Added to the seeds, to see whether the outputs are random.
    """
    calls = layer_calls(model, batch, training)
    found = first_difference(calls, layer_calls(model, other, training), kept)
    if found is None:
        return None
    again = layer_calls(model, batch, training, shift)
    if differ(again[-1].outputs, calls[-1].outputs, kept):  # drawn anew in each call
        return None
    return f"{type(found).__name__} {found.name!r} mixes the rows of a batch"


def _concatenated(first: Any, second: Any) -> Any:
    """Concatenates the rows of two batches; leaves without rows are those of the first."""

    def concatenated(a: Any, b: Any) -> Any:
        if not has_rows(a):
            return a
        if isinstance(a, tf.SparseTensor):
            return tf.sparse.concat(0, [a, b])
        return tf.concat([a, b], 0)

    return tf.nest.map_structure(concatenated, first, second)


class LayerCall(NamedTuple):
    """One call of a layer, or of the model itself, with its inputs and outputs."""

    layer: keras.layers.Layer
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


def layer_calls(model: keras.Model, x: Any, training: bool, shift: int = 0) -> list[LayerCall]:
    """Calls a model and returns the calls of all layers in the order in which they returned.

    The last one is the model's own.

    Args:
        model: Built; does not change.
        x: Inputs.
        training: As in `Model.call`.
        shift: Added to the seeds of random layers.
    """
    calls: list[LayerCall] = []

    def recorded(layer: keras.layers.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def record(*args: Any, **options: Any) -> Any:
            outputs = call(*args, **options)
            calls.append(LayerCall(layer, _arrays((args, options)), _arrays(outputs)))
            return outputs

        return record

    seeds = [(v, v + tf.cast(shift, v.dtype)) for v in keras_model.seeds_of(model)]
    with ExitStack() as stack:
        stack.enter_context(keras.StatelessScope(seeds))
        for layer in flatten_layers(model):
            stack.enter_context(replaced(layer, "call", recorded(layer, layer.call)))
        model(x, training=training) if keras_model.takes_training(model) else model(x)
    return calls


def first_difference(
    some: Sequence[LayerCall], others: Sequence[LayerCall], rows: int
) -> keras.layers.Layer | None:
    """Returns the first layer with different outputs for the same rows, if the model has any."""
    if not differ(some[-1].outputs, others[-1].outputs, rows):
        return None
    for a, b in zip(some, others, strict=False):
        if differ(a.outputs, b.outputs, rows) and not differ(a.inputs, b.inputs, rows):
            return a.layer
    return some[-1].layer


def differ(some: list[np.ndarray], others: list[np.ndarray], rows: int) -> bool:
    """Tells whether arrays differ in their first rows by more than rounding."""
    pairs = zip(some, others, strict=True)
    return len(some) != len(others) or not all(_equal(a[:rows], b[:rows]) for a, b in pairs)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype.kind not in "fc":
        return np.array_equal(a, b)
    tolerance = 0.05 if a.dtype.itemsize == 2 else 1e-4
    return np.allclose(a, b, rtol=tolerance, atol=tolerance * _mean_size(b), equal_nan=True)


def _mean_size(array: np.ndarray) -> float:
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).mean()) if finite.size else 0.0


def _arrays(structure: Any) -> list[np.ndarray]:
    return [_array(leaf) for leaf in keras.tree.flatten(structure) if tf.is_tensor(leaf)]


def _array(tensor: Any) -> np.ndarray:
    if isinstance(tensor, tf.RaggedTensor):
        tensor = tensor.to_tensor()
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    is_bfloat16 = tensor.dtype == tf.bfloat16  # not a floating type of NumPy
    return np.atleast_1d(np.asarray(tf.cast(tensor, tf.float16) if is_bfloat16 else tensor))
