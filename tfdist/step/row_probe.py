"""Whether the rows of a batch depend on each other, so that no share can be computed alone.

A layer may subtract the batch's mean, an output may be the distances of all pairs, a number of
rows may be written into the model. The first batch is asked: what do a few of its rows come to
beside others, and by themselves?
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.model_setup.mismatch import cause
from tfdist.step import batch_norm
from tfdist.step.known_layers import treat_rows_alone
from tfdist.step.layer_calls import differ, first_difference, layer_calls
from tfdist.step.mean_or_sum import Aggregations
from tfdist.step.scope import Scope
from tfdist.strategies import shares
from tfdist.strategies.row_counts import has_rows, num_rows, uneven
from tfdist.upstream import keras_model

#: Rows that stay, while as many others change.
_NUM_ROWS = 2


def why_whole(model: keras.Model, first_batch: Callable[[], Any], training: bool) -> str | None:
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
    first, second = shares.take(x, 0, kept), shares.take(x, kept, 2 * kept)
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
            model(shares.take(x, 0, min(_NUM_ROWS, int(num_rows(x)))), **options)
    except Exception:  # said where a step computes it
        return None
    generator = keras_model.global_generator()
    known = [*keras_model.seeds_of(model), *model.metrics_variables]
    known += [v for layer in batch_norm.layers_of(model) for v in layer.variables]
    known += [] if generator is None else [generator.state]
    states = [v for v in scope.updated.values() if all(v is not other for other in known)]
    aggregations = Aggregations(model, lambda: (x,))
    try:
        if scope.losses:
            aggregations.of_losses(len(scope.losses), training)
        for state in states:
            aggregations.of_state(state)
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
