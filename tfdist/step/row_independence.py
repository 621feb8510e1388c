"""Detects models in which the rows of a batch depend on each other: they need full batches.

A layer may subtract the batch's mean, an output may hold the distances between all pairs of rows,
and a number of rows may be hard-coded in the model. Such a model cannot be computed on parts of a
batch. Models that are made of Keras's own layers are known to be row by row. Others are analyzed:
their forward pass is traced, and the axis of the rows is followed through the graph. Where the
analysis meets an operation that it does not know, the model is probed: the outputs of a few rows
must not change with the other rows in the batch, at several perturbations of weights and rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.model_setup.build import root_cause
from tfdist.step import batch_norm, perturbation
from tfdist.step.reduction_probe import ReductionProbe
from tfdist.step.reductions import DECISIONS
from tfdist.step.row_by_row import has_only_row_by_row_layers
from tfdist.step.row_dependence import FREE, MIXED, UNKNOWN
from tfdist.step.scope import Scope
from tfdist.step.traced_forward import TracedForward, change_is_sum
from tfdist.strategies import batches
from tfdist.strategies.batches import has_rows, num_rows, uneven
from tfdist.upstream import keras_model
from tfdist.upstream.keras_model import flatten_layers
from tfdist.upstream.patching import replaced

logger = logging.getLogger(__name__)

#: Rows that a probe keeps, while it replaces as many others.
_NUM_ROWS = 2


def full_batch_reason(
    model: keras.Model, first_batch: Callable[[], Any], training: bool, predicts: bool = False
) -> str | None:
    """Returns why a model needs full batches, with the name of the layer; None if it does not.

    Args:
        model: A built model.
        first_batch: Returns the first global batch. Called outside of any graph, and only for a
            model that has other layers than Keras's.
        training: Whether the model is called as in training.
        predicts: Whether replicas exchange nothing but outputs, so that a state which the call
            updates needs full batches.
    """
    if training and (found := _overwritten_weight(model)):
        return f"{found} is updated with the largest value of the full batch"
    if has_only_row_by_row_layers(model):
        return None
    with tf.init_scope(), ExitStack() as stack:
        batch = first_batch()
        stack.enter_context(batch_norm.fixed_moments(model))  # each replica's are documented
        x = keras.utils.unpack_x_y_sample_weight(batch)[0]
        if (found := uneven(batch)) is not None:
            return found
        probe = ReductionProbe(model, lambda: (x,))
        traced = probe.traced(training)
        return _outputs_reason(model, traced, x, training) or _reductions_reason(
            probe, traced, model, x, training, predicts
        )


def _outputs_reason(
    model: keras.Model, traced: TracedForward | None, x: Any, training: bool
) -> str | None:
    """Returns which layer mixes rows, by the static analysis, or else by probes."""
    decision, layer = (UNKNOWN, None) if traced is None else traced.mixing_layer()
    DECISIONS["probe" if decision is UNKNOWN else "analysis"] += 1
    if decision is UNKNOWN:
        return _probe_outputs(model, x, training)
    return None if decision is FREE else mixes_rows(layer)


def mixes_rows(layer: keras.layers.Layer) -> str:
    """Returns the reason for full-batch mode that a layer gives."""
    return f"{type(layer).__name__} {layer.name!r} mixes the rows of a batch"


def _overwritten_weight(model: keras.Model) -> str | None:
    """Returns a weight whose gradient is its new value: the running maximum of a float8 layer."""
    found = (v.path for v in model.trainable_variables if v.overwrite_with_gradient)
    return next(found, None)


def _probe_outputs(model: keras.Model, x: Any, training: bool) -> str | None:
    """Compares the outputs of rows beside other rows with their outputs in another batch."""
    num_kept = min(_NUM_ROWS, int(num_rows(x)) // 2)
    if num_kept == 0:
        return "the first batch has only one row, from which nothing can be inferred"
    try:
        if (found := _probe_perturbed(model, x, training, num_kept, 0)) is not None:
            return found
    except Exception as error:
        try:
            layer_calls(model, x, training)
        except Exception as broken:
            # The first step raises the same error, with a message about model and data.
            logger.debug("The model cannot be probed: %s", broken)
            return None
        return f"the model takes no other number of rows ({root_cause(error)})"
    for number in range(1, perturbation.COUNT):
        with suppress(Exception):  # other rows may be invalid to the model
            if (found := _probe_perturbed(model, x, training, num_kept, number)) is not None:
                return found
    return None


def _probe_perturbed(
    model: keras.Model, x: Any, training: bool, num_kept: int, number: int
) -> str | None:
    rows = perturbation.batch(batches.take(x, 0, 2 * num_kept), number)
    first, second = batches.take(rows, 0, num_kept), batches.take(rows, num_kept, 2 * num_kept)
    # Both ways: the largest value of a batch affects only the rows that do not hold it.
    return _probe_beside(model, first, second, training, number) or _probe_beside(
        model, second, first, training, number
    )


def _probe_beside(
    model: keras.Model, some: Any, others: Any, training: bool, number: int
) -> str | None:
    num_kept = int(num_rows(some))
    both, twice = _concatenated(some, others), _concatenated(some, some)
    # With as many rows, random layers draw the same numbers. Fewer rows are probed without them.
    return _mixing_layer(model, both, twice, num_kept, training, number) or _mixing_layer(
        model, both, some, num_kept, False, number, shift=1
    )


def _reductions_reason(
    probe: ReductionProbe,
    traced: TracedForward | None,
    model: keras.Model,
    x: Any,
    training: bool,
    predicts: bool,
) -> str | None:
    """Returns which added loss or updated state needs the full batch.

    In a prediction, every updated state does. Otherwise it is one that is neither a mean nor a sum
    over rows.
    """
    generator = keras_model.global_generator()
    metrics = {id(v) for v in model.metrics_variables}
    known = {id(v) for v in keras_model.seeds_of(model)} | (set() if predicts else metrics)
    known |= {id(v) for layer in batch_norm.layers_of(model) for v in layer.variables}
    known |= set() if generator is None else {id(generator.state)}
    if traced is not None:
        for variable, start, new in traced.changed:
            is_metric = id(variable) in metrics
            if is_metric and change_is_sum(traced.analysis, start, new) is MIXED:
                return f"the update of {variable.path!r} is not a sum over rows"
        num_losses, updated = len(traced.losses), [variable for variable, *_ in traced.changed]
    else:
        try:
            num_losses, updated = _losses_and_updates(model, x, training)
        except Exception as error:
            # The first step raises the same error, with a message about model and data.
            logger.debug("Added losses and states cannot be probed: %s", error)
            return None
    try:
        if num_losses:
            probe.loss_reductions(num_losses, training)
        for state in updated:
            if id(state) in known or keras_model.is_seed(state):
                continue
            if predicts:
                return f"a prediction updates {state.path!r}"
            probe.state_reduction(state)
    except UnsupportedModelError as error:
        return str(error).split(",")[0]
    return None


def _losses_and_updates(
    model: keras.Model, x: Any, training: bool
) -> tuple[int, list[keras.Variable]]:
    """Returns the number of added losses, and the variables that a call updates."""
    options = {"training": training} if keras_model.takes_training(model) else {}
    with Scope(collect_losses=True) as scope:
        model(batches.take(x, 0, min(_NUM_ROWS, int(num_rows(x)))), **options)
    return len(scope.losses), list(scope.updated.values())


def _mixing_layer(
    model: keras.Model,
    batch: Any,
    other: Any,
    num_kept: int,
    training: bool,
    number: int = 0,
    shift: int = 0,
) -> str | None:
    """Names the layer whose outputs for a batch's first rows change with the rows beside them.

    Args:
        model: A built model.
        batch: Inputs.
        other: Inputs that begin with the same rows.
        num_kept: Number of these rows.
        training: As in `Model.call`.
        number: Number of the perturbation of the weights.
        shift: Added to the seeds, to see whether the outputs are random.
    """
    calls = layer_calls(model, batch, training, number=number)
    found = first_difference(calls, layer_calls(model, other, training, number=number), num_kept)
    if found is None:
        return None
    again = layer_calls(model, batch, training, shift, number)
    if differ(again[-1].outputs, calls[-1].outputs, num_kept):  # drawn anew in each call
        return None
    return mixes_rows(found)


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


def layer_calls(
    model: keras.Model, x: Any, training: bool, shift: int = 0, number: int = 0
) -> list[LayerCall]:
    """Calls a model and returns the calls of all layers in the order in which they returned.

    The last one is the model's own.

    Args:
        model: A built model, which is not changed.
        x: Inputs.
        training: As in `Model.call`.
        shift: Added to the seeds of random layers.
        number: Number of the perturbation of the weights.
    """
    calls: list[LayerCall] = []

    def recorded(layer: keras.layers.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def record(*args: Any, **options: Any) -> Any:
            outputs = call(*args, **options)
            calls.append(LayerCall(layer, _arrays((args, options)), _arrays(outputs)))
            return outputs

        return record

    seeds = keras_model.seeds_of(model)
    values = [(v, v + tf.cast(shift, v.dtype)) for v in seeds]
    if number:
        fixed = {id(v) for layer in batch_norm.layers_of(model) for v in layer.variables}
        others = [v for v in model.trainable_variables if id(v) not in fixed]
        values += perturbation.values(others, number)
    with ExitStack() as stack:
        stack.enter_context(keras.StatelessScope(values))
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
    """Returns whether arrays differ in their first rows by more than rounding."""
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
