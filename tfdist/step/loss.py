"""The loss of the global batch, computed in parts by the replicas.

The total loss consists of compiled losses, losses that layers add, and penalties on weights. Every
replica computes its part, and the parts of all replicas add up to the number that one device
computes. Keras would divide a loss by the rows, mask entries, or weights that it sees, but those of
one replica are not those of the global batch. Here every divisor is the global batch's. A loss
that is not a sum over rows is computed on every replica from the gathered global batch, and counts
as 1/N on each of N replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from tfdist.replica.replica import Replica
from tfdist.replica.scope import Scope
from tfdist.rows import Reduction, Rows
from tfdist.upstream import keras_losses, keras_model
from tfdist.upstream.keras_losses import compile_loss, total_loss

_MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")


def replica_loss(
    model: keras.Model,
    replica: Replica,
    batch: tuple[Any, Any, Any],
    y_pred: Any,
    added: list[tf.Tensor],
    rows: Rows,
    training: bool,
) -> tf.Tensor:
    """Returns a replica's part of the global batch's loss.

    Returns:
        A float scalar; with a loss that is compiled without reduction, a vector whose elements
        are summed.
    """
    x, y, sample_weight = batch
    penalties = [v.regularizer(v) for v in model.trainable_weights if v.regularizer is not None]
    is_all = replica.num_microbatches == 1
    if added and not is_all:
        # A mean over no rows is 0 instead of NaN.
        values = [replica.if_counted(_aggregate(loss)) for loss in added]
        kinds = rows.reductions.loss_reductions(len(added), training)
        added = [
            value if kind is Reduction.SUM else replica.by_rows(value)
            for value, kind in zip(values, kinds, strict=True)
        ]
    if is_all or keras_model.overrides(model, "compute_loss"):
        # Each replica counts 1/N of the loss, and the backward pass sums over the replicas.
        all_added = replica.sum_through(added) + penalties
        gathered = replica.gather((x, y, y_pred, sample_weight))
        gather_masks_and_logits(replica, y_pred, gathered[2])
        with nullcontext() if is_all else _full_batch(replica):
            loss = total_loss(model, all_added, gathered, training)
        return loss if is_all else loss / replica.num_replicas
    losses = added + [replica.by_rows(_aggregate(penalty)) for penalty in penalties]
    if compile_loss(model) is not None:
        compiled = compile_loss_on_replica(compile_loss(model), replica, rows)
        losses.insert(0, compiled(y, y_pred, sample_weight))
    if not losses:
        raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
    if len(losses) == 1:
        return losses[0]
    dtype = tf.float64 if any(v.dtype == tf.float64 for v in losses) else tf.float32
    return tf.add_n([tf.cast(v, dtype) for v in losses])


def track_loss(tracker: keras.metrics.Mean, loss: tf.Tensor, replica: Replica) -> None:
    """Adds a replica's part of the loss to a metric, which counts each batch once, by its rows."""
    rows = tf.cast(replica.total_rows, tracker.dtype)
    if loss.shape.rank:  # compiled without reduction: Keras logs the mean of the vector
        per_row = tf.cast(tf.reduce_prod(tf.shape(loss)[1:]), tracker.dtype)
        loss = tf.reduce_sum(tf.cast(loss, tracker.dtype)) / (rows * per_row)
    num_parts = replica.num_microbatches
    tracker.update_state(loss * num_parts, sample_weight=rows / num_parts)


def gather_masks_and_logits(replica: Replica, local: Any, gathered: Any) -> None:
    """Gathers what Keras attaches to outputs for losses: masks, and logits of probabilities."""
    if replica.num_replicas == 1:
        return
    for part, whole in zip(tf.nest.flatten(local), tf.nest.flatten(gathered), strict=True):
        if (mask := keras_model.mask_of(part)) is not None:
            keras_model.set_mask(whole, replica.gather(mask))
        if (logits := keras_model.logits_of(part)) is not None:
            keras_model.set_logits(whole, replica.gather(logits))


def compile_loss_on_replica(compile_loss: Any, replica: Replica, rows: Rows) -> Any:
    """Returns a view of Keras's `CompileLoss` that computes a replica's part of each loss."""
    losses = [
        _ReplicaLoss(loss, replica, functools.partial(rows.reductions.has_independent_rows, number))
        for number, loss in enumerate(keras_losses.compiled_losses(compile_loss))
    ]
    trackers = [
        _ReplicaTracker(tracker, replica.num_microbatches)
        for tracker in keras_losses.loss_trackers(compile_loss)
    ]
    return keras_losses.compile_loss_of(compile_loss, losses, trackers)


class _ReplicaTracker:
    """Feeds each replica's part of a value to a `Mean`, which counts it once per batch."""

    def __init__(self, tracker: keras.metrics.Mean, num_parts: int) -> None:
        self._tracker, self._num_parts = tracker, num_parts

    def update_state(self, value: tf.Tensor, sample_weight: Any = None) -> None:
        """Adds a part; a vector (no reduction) is averaged over its elements, as in Keras."""
        del sample_weight
        if value.shape.rank:
            self._tracker.update_state(value)
        else:
            self._tracker.update_state(value * self._num_parts, 1.0 / self._num_parts)


class _ReplicaLoss:
    """A compiled loss on one replica: the replica's rows over divisors of the global batch."""

    def __init__(
        self,
        loss: keras.losses.Loss,
        replica: Replica,
        has_independent_rows: Callable[[Any, Any], bool],
    ) -> None:
        self._loss, self._replica = loss, replica
        self._has_independent_rows = has_independent_rows

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        loss = self._loss
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            return self._of_full_batch(y_true, y_pred, sample_weight)

        def as_tensor(value: Any) -> tf.Tensor:
            return keras.ops.convert_to_tensor(value, dtype=loss.dtype)

        in_mask = keras_model.mask_of(y_pred)
        predicted = keras.tree.map_structure(as_tensor, y_pred)
        expected = keras.tree.map_structure(as_tensor, y_true)
        before = _scoped_values()
        values = loss.call(expected, predicted)
        if not hasattr(values, "shape"):
            values = as_tensor(values)  # a Python number
        rows = tf.nest.flatten(predicted)[0].shape[0]
        is_by_row = values.shape.rank != 0 and values.shape[0] == rows
        is_by_row = is_by_row and _has_weight_per_row(values, sample_weight)
        if not (is_by_row and self._has_independent_rows(expected, predicted)):
            if (scope := keras_model.stateless_scope()) is not None:
                scope.state_mapping.clear()
                scope.state_mapping.update(before)
            return self._of_full_batch(y_true, y_pred, sample_weight)
        masks = [m for m in (in_mask, keras_model.mask_of(values)) if m is not None]
        mask = (masks[0] & masks[1] if len(masks) == 2 else masks[0]) if masks else None
        values = keras.ops.convert_to_tensor(values, dtype=loss.dtype)
        # User code always sees at least one row; padding is dropped only here.
        return self._reduce(*self._replica.drop_padding((values, sample_weight, mask)))

    def _of_full_batch(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        """Returns 1/N of the loss of the gathered global batch."""
        replica = self._replica
        y_true, gathered, sample_weight = replica.gather((y_true, y_pred, sample_weight))
        gather_masks_and_logits(replica, y_pred, gathered)
        with _full_batch(replica):
            loss = self._loss(y_true, gathered, sample_weight)
        return loss / replica.num_replicas

    def _reduce(self, values: tf.Tensor, weight: Any, mask: Any) -> tf.Tensor:
        """Does what Keras's `reduce_weighted_values` does, with divisors of the global batch."""
        reduction, dtype = self._loss.reduction, values.dtype
        if weight is not None:
            weight = keras.ops.convert_to_tensor(weight, dtype=dtype)
        # Zeros and ones; Keras's factor total / valid for means comes below.
        weight = keras_losses.masked_weights(weight, mask, dtype)
        if weight is not None:
            weight = tf.cast(weight, dtype)
            values, weight = keras_losses.of_same_rank(values, weight)
            values = values * weight
        if reduction not in _MEANS:
            return values if reduction in (None, "none") else tf.reduce_sum(values)
        if reduction == "mean_with_sample_weight" and weight is not None:
            divisor = self._replica.sum([tf.reduce_sum(weight)])[0]
        else:
            divisor = self._global_size(values)
            if mask is not None:
                valid = self._replica.sum([tf.reduce_sum(tf.cast(mask, dtype))])[0]
                divisor *= tf.math.divide_no_nan(valid, self._global_size(mask, dtype))
        return tf.math.divide_no_nan(tf.reduce_sum(values), divisor)

    def _global_size(self, tensor: tf.Tensor, dtype: Any = None) -> tf.Tensor:
        """Returns the number of elements that `tensor` has in the global batch."""
        dtype = dtype or tensor.dtype
        per_row = tf.cast(tf.reduce_prod(tf.shape(tensor)[1:]), dtype)
        return tf.cast(self._replica.total_rows, dtype) * per_row


@contextmanager
def _full_batch(replica: Replica) -> Iterator[None]:
    """Returns a context for a loss of the gathered rows of the global batch.

    What it adds to metrics counts once.
    """
    before, scope = _scoped_values(), keras_model.stateless_scope()
    with replica.full_batch():
        yield
    if isinstance(scope, Scope):
        scope.note_alike(before, tf.equal(replica.microbatch, 0))


def _scoped_values() -> dict[int, Any]:
    """Returns the values that were assigned to variables in the replica's scope, by id."""
    scope = keras_model.stateless_scope()
    return {} if scope is None else dict(scope.state_mapping)


def _has_weight_per_row(values: Any, weight: Any) -> bool:
    """Returns whether weights are for the rows of values, and not broadcast along other axes.

    Keras converts a list of weights to a tensor, whose first axis is not that of the rows, and
    weights of lower rank than the values are for their last axes.
    """
    if weight is None or keras.tree.is_nested(weight):
        return weight is None
    rank = len(weight.shape)
    is_expanded = rank == len(values.shape) - 1 and values.shape[-1] == 1
    return rank == 0 or rank >= len(values.shape) or is_expanded


def _aggregate(loss: tf.Tensor) -> tf.Tensor:
    """Does what `Model._aggregate_additional_loss` does, without dividing by the replicas."""
    return tf.reduce_sum(tf.cast(loss, keras.config.floatx()))
