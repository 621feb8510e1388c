"""Whether the rows of a batch depend on each other, so that no share can be computed alone.

A layer may subtract the batch's mean, an output may be the distances of all pairs, a number of
rows may be written into the model. The first batch is asked: what do a few of its rows come to
beside others, and by themselves?

Whether a model is made of nothing but layers that are known to treat each row by itself.

What the layers of a model were called with, and what they returned: to find where two differ.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.model_setup.build import cause
from tfdist.step import batch_norm
from tfdist.step.parameter_gather import Scope
from tfdist.step.reductions import ReductionProbe
from tfdist.strategies import batches
from tfdist.strategies.batches import has_rows, num_rows, uneven
from tfdist.upstream import keras_model
from tfdist.upstream.keras_model import flatten_layers
from tfdist.upstream.patching import replaced

#: Rows that stay, while as many others change.
_NUM_ROWS = 2


def full_batch_reason(
    model: keras.Model, first_batch: Callable[[], Any], training: bool
) -> str | None:
    """Returns why no share of a batch can be computed alone, naming the layer; None: it can.

    Args:
        model: Built.
        first_batch: Returns the first global batch; called outside of any graph, and only for a
            model that is not made of Keras's own layers alone.
        training: Whether the model is called as in training.
    """
    if training and (found := _overwritten(model)):
        return f"{found} takes the largest value of a batch"
    if treat_rows_alone(model):
        return None
    with tf.init_scope(), ExitStack() as stack:
        batch = first_batch()
        for layer in batch_norm.layers_of(model):  # moments of a share are documented
            moving = functools.partial(_moving_moments, layer)
            stack.enter_context(keras_model.moments_taken_by(layer, moving))
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        return uneven(batch) or _asked(model, x, training) or _no_sum(model, x, training)


def _overwritten(model: keras.Model) -> str | None:
    """A weight whose gradient is its new value: the running maxima of float8 layers."""
    found = (v.path for v in model.trainable_variables if v.overwrite_with_gradient)
    return next(found, None)


def _moving_moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    del mask
    mean, variance = layer.moving_mean, layer.moving_variance
    return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


def _asked(model: keras.Model, x: Any, training: bool) -> str | None:
    """Compares what rows come to beside others with different ones beside them, and with none."""
    kept = min(_NUM_ROWS, int(num_rows(x)) // 2)
    if kept == 0:
        return None
    first, second = batches.take(x, 0, kept), batches.take(x, kept, 2 * kept)
    try:
        # Each beside the other: the largest value of a batch moves only the rows that lack it.
        return _beside(model, first, second, training) or _beside(model, second, first, training)
    except Exception as error:
        try:
            layer_calls(model, x, training)
        except Exception:  # what is wrong is said where a step computes it
            return None
        return f"the model takes no other number of rows ({cause(error)})"


def _beside(model: keras.Model, some: Any, others: Any, training: bool) -> str | None:
    kept = int(num_rows(some))
    both, twice = _end_to_end(some, others), _end_to_end(some, some)
    # Random layers draw the same for as many rows; the rest is asked where they are at rest.
    return _mixing(model, both, twice, kept, training) or _mixing(
        model, both, some, kept, training=False, shift=1
    )


def _no_sum(model: keras.Model, x: Any, training: bool) -> str | None:
    """Says which added loss or updated state of a share is no part of the batch's."""
    options = {"training": training} if keras_model.takes_training(model) else {}
    try:
        with Scope(collect_losses=True) as scope:
            model(batches.take(x, 0, min(_NUM_ROWS, int(num_rows(x)))), **options)
    except Exception:  # said where a step computes it
        return None
    generator = keras_model.global_generator()
    known = [*keras_model.seeds_of(model), *model.metrics_variables]
    known += [v for layer in batch_norm.layers_of(model) for v in layer.variables]
    known += [] if generator is None else [generator.state]
    states = [v for v in scope.updated.values() if all(v is not other for other in known)]
    reductions = ReductionProbe(model, lambda: (x,))
    try:
        if scope.losses:
            reductions.loss_reductions(len(scope.losses), training)
        for state in states:
            reductions.state_reduction(state)
    except UnsupportedModelError as error:
        return str(error).split(",")[0]
    return None


def _mixing(
    model: keras.Model, batch: Any, other: Any, kept: int, training: bool, shift: int = 0
) -> str | None:
    """Names the layer that makes something else of a batch's first rows in another batch.

    Args:
        model: To call.
        batch: Inputs.
        other: Inputs that begin with the same rows.
        kept: How many they are.
        training: As in `Model.call`.
        shift: Of the seeds, by which to see whether the numbers are random ones.
    """
    calls = layer_calls(model, batch, training)
    found = first_difference(calls, layer_calls(model, other, training), kept)
    if found is None:
        return None
    again = layer_calls(model, batch, training, shift)
    if differ(again[-1].outputs, calls[-1].outputs, kept):  # drawn anew in each call
        return None
    return f"{type(found).__name__} {found.name!r} mixes the rows of a batch"


def _end_to_end(first: Any, second: Any) -> Any:
    """Lays the rows of two batches end to end; what has none is the first's."""

    def joined(a: Any, b: Any) -> Any:
        if not has_rows(a):
            return a
        if isinstance(a, tf.SparseTensor):
            return tf.sparse.concat(0, [a, b])
        return tf.concat([a, b], 0)

    return tf.nest.map_structure(joined, first, second)


#: Whose parts do; preprocessing has some that do not (MelSpectrogram, MixUp, TextVectorization).
_ROW_BY_ROW = ("keras.src.layers.", "keras.src.models.", "keras.src.applications.")
_UNKNOWN = ("keras.src.layers.preprocessing.", "keras.src.layers.core.lambda_layer")


def treat_rows_alone(model: keras.Model) -> bool:
    """Tells whether all layers of a model are Keras's own, used in a way that mixes no rows.

    BatchNormalization is one of them: that its moments are those of a share is documented.
    """
    return all(_is_known(layer) for layer in flatten_layers(model))


def _is_known(layer: keras.layers.Layer) -> bool:
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
    # Ours are those that a trainer has put in the place of Keras's.
    return all(_is_of_keras(function, "keras.src.", "tfdist.") for function in functions)


def _is_of_keras(source: Any, *where: str) -> bool:
    module = getattr(source, "__module__", None) or ""
    return module.startswith(where or _ROW_BY_ROW) and not module.startswith(_UNKNOWN)


def _is_function(value: Any) -> bool:
    """Whether it is an activation, or the like, that a layer was given."""
    return inspect.isroutine(value) or isinstance(value, functools.partial)


class LayerCall(NamedTuple):
    """One call of a layer, or of the model itself."""

    layer: keras.layers.Layer
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


def layer_calls(model: keras.Model, x: Any, training: bool, shift: int = 0) -> list[LayerCall]:
    """Calls a model and returns the calls of all layers, as they came back: the model's is last.

    Args:
        model: Built; it stays as it is.
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
        for layer in keras_model.flatten_layers(model):
            stack.enter_context(replaced(layer, "call", recorded(layer, layer.call)))
        model(x, training=training) if keras_model.takes_training(model) else model(x)
    return calls


def first_difference(
    some: Sequence[LayerCall], others: Sequence[LayerCall], rows: int
) -> keras.layers.Layer | None:
    """Returns the layer that makes something else of the same first rows, if the model does."""
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
    return np.allclose(a, b, rtol=tolerance, atol=tolerance * _size(b), equal_nan=True)


def _size(array: np.ndarray) -> float:
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).mean()) if finite.size else 0.0


def _arrays(structure: Any) -> list[np.ndarray]:
    return [_array(leaf) for leaf in keras.tree.flatten(structure) if tf.is_tensor(leaf)]


def _array(tensor: Any) -> np.ndarray:
    if isinstance(tensor, tf.RaggedTensor):
        tensor = tensor.to_tensor()
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    half = tensor.dtype == tf.bfloat16  # NumPy calls it no float
    return np.atleast_1d(np.asarray(tf.cast(tensor, tf.float16) if half else tensor))
