"""What a share of the batch contributes to the loss of the whole.

Keras divides a loss by the rows, mask entries or weights that it sees, and those of a share are
not those of the batch. Here each divisor is the global batch's, so that the contributions of all
replicas add up to the number that one device computes. A loss that is no sum over rows is computed
whole on every replica, from gathered outputs, and counted as 1/N.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.losses import loss as keras_loss

from tfdist.kinds import Kind
from tfdist.replica import Replica

_MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")


def contribution(
    model: keras.Model,
    replica: Replica,
    batch: tuple[Any, Any, Any],
    y_pred: Any,
    added: list[tuple[tf.Tensor, Kind]],
    training: bool,
) -> tf.Tensor:
    """Returns this share's part of the global batch's loss.

    Args:
        model: Compiled.
        replica: Whose share this is.
        batch: `(x, y, sample_weight)` of the share.
        y_pred: The model's output for it.
        added: What `add_loss` and activity regularisers gave, and how each adds up.
        training: As in `Model.compute_loss`.

    Returns:
        A float scalar; with a loss that is compiled without reduction, a vector whose elements
        are summed.
    """
    x, y, sample_weight = batch
    penalties = [v.regularizer(v) for v in model.trainable_weights if v.regularizer is not None]
    whole = replica.num_parts == 1
    if whole or type(model).compute_loss is not keras.Model.compute_loss:
        override = [_global(replica, loss, kind) for loss, kind in added] + penalties
        x, y, y_pred_whole, sample_weight = replica.gather((x, y, y_pred, sample_weight))
        _gather_masks(replica, y_pred, y_pred_whole)
        loss = _with_losses(model, override, (x, y, y_pred_whole, sample_weight), training)
        return loss if whole else loss / replica.num_replicas
    losses = [_part_of(replica, loss, kind) for loss, kind in added]
    losses += [_aggregate(penalty) * replica.fraction for penalty in penalties]
    if model._compile_loss is not None:
        losses.insert(0, _on_share(model._compile_loss, replica)(y, y_pred, sample_weight))
    if not losses:
        raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
    return losses[0] if len(losses) == 1 else tf.add_n([tf.cast(v, tf.float32) for v in losses])


def track(tracker: keras.metrics.Mean, loss: tf.Tensor, replica: Replica) -> None:
    """Counts the loss of a batch once, weighted by its rows, from the parts on every replica."""
    rows = tf.cast(replica.total_rows, tf.float32)
    if loss.shape.rank:  # compiled without reduction: Keras logs the mean of the vector
        per_row = tf.cast(tf.reduce_prod(tf.shape(loss)[1:]), tf.float32)
        loss = tf.reduce_sum(tf.cast(loss, tf.float32)) / (rows * per_row)
    tracker.update_state(loss * replica.num_parts, sample_weight=rows / replica.num_parts)


def _with_losses(model: keras.Model, added: list, batch: tuple, training: bool) -> tf.Tensor:
    """Keras's own total loss, with these as `model.losses`."""
    model._losses_override.extend(added)
    try:
        return model._compute_loss(*batch, training=training)
    finally:
        model._losses_override.clear()


def _global(replica: Replica, loss: tf.Tensor, kind: Kind) -> tf.Tensor:
    """An added loss of the whole batch, on every replica."""
    if replica.num_parts == 1:
        return loss
    # Each replica counts 1/N of the whole loss, and the way back sums over the replicas.
    return replica.sum_through([_part_of(replica, loss, kind)])[0]


def _part_of(replica: Replica, loss: tf.Tensor, kind: Kind) -> tf.Tensor:
    """What an added loss of this share adds to the batch's; a mean over no rows is no NaN."""
    value = tf.where(replica.num_rows > 0, _aggregate(loss), 0.0)
    return value if kind is Kind.SUM else value * replica.fraction


def _aggregate(loss: tf.Tensor) -> tf.Tensor:
    """As `Model._aggregate_additional_loss`, which also divides by the replicas."""
    return tf.reduce_sum(tf.cast(loss, keras.config.floatx()))


def _gather_masks(replica: Replica, shares: Any, wholes: Any) -> None:
    """Gathers the Keras masks that the outputs carry, onto the gathered outputs."""
    if replica.num_replicas == 1:
        return
    for share, whole in zip(tf.nest.flatten(shares), tf.nest.flatten(wholes), strict=True):
        mask = backend.get_keras_mask(share)
        if mask is not None:
            backend.set_keras_mask(whole, replica.gather(mask))


def _on_share(compile_loss: Any, replica: Replica) -> Any:
    """A view of Keras's `CompileLoss` whose losses and per-output trackers see the global batch."""
    view = object.__new__(type(compile_loss))  # copy.copy() would save and load it
    view.__dict__.update(compile_loss.__dict__)
    view._flat_losses = [
        entry._replace(loss=_ShareLoss(entry.loss, replica)) for entry in compile_loss._flat_losses
    ]
    view._metrics = [_PartTracker(tracker, replica.num_parts) for tracker in compile_loss._metrics]
    return view


class _PartTracker:
    """Feeds parts of a value to a `Mean`, which shall count the value once a batch."""

    def __init__(self, tracker: keras.metrics.Mean, num_parts: int) -> None:
        self._tracker, self._num_parts = tracker, num_parts

    def update_state(self, value: tf.Tensor, sample_weight: Any = None) -> None:
        """Adds a part; a vector (no reduction) is averaged over its elements as Keras does."""
        del sample_weight
        if value.shape.rank:
            self._tracker.update_state(value)
        else:
            self._tracker.update_state(value * self._num_parts, 1.0 / self._num_parts)


class _ShareLoss:
    """One compiled loss on a share: rows of this replica over divisors of the global batch."""

    def __init__(self, loss: keras.losses.Loss, replica: Replica) -> None:
        self._loss, self._replica = loss, replica

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        loss = self._loss
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            return self._of_whole(y_true, y_pred, sample_weight)

        def as_tensor(value: Any) -> tf.Tensor:
            return keras.ops.convert_to_tensor(value, dtype=loss.dtype)

        in_mask = backend.get_keras_mask(y_pred)
        predicted = keras.tree.map_structure(as_tensor, y_pred)
        values = loss.call(keras.tree.map_structure(as_tensor, y_true), predicted)
        if not _has_rows(values, predicted):
            return self._of_whole(y_true, y_pred, sample_weight)
        masks = [m for m in (in_mask, backend.get_keras_mask(values)) if m is not None]
        mask = (masks[0] & masks[1] if len(masks) == 2 else masks[0]) if masks else None
        values = keras.ops.convert_to_tensor(values, dtype=loss.dtype)
        return self._reduce(values, sample_weight, mask)

    def _of_whole(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        """The loss of the gathered batch, of which this replica counts 1/N."""
        replica = self._replica
        y_true, whole, sample_weight = replica.gather((y_true, y_pred, sample_weight))
        _gather_masks(replica, y_pred, whole)
        return self._loss(y_true, whole, sample_weight) / replica.num_replicas

    def _reduce(self, values: tf.Tensor, weight: Any, mask: Any) -> tf.Tensor:
        """`keras.src.losses.loss.reduce_weighted_values`, with divisors of the global batch."""
        reduction, dtype = self._loss.reduction, values.dtype
        if weight is not None:
            weight = keras.ops.convert_to_tensor(weight, dtype=dtype)
        # A "sum" leaves the mask at 0 and 1; Keras's factor total/valid for means comes below.
        weight = keras_loss.apply_mask(weight, mask, dtype=dtype, reduction="sum")
        if weight is not None:
            weight = tf.cast(weight, dtype)
            values, weight = keras_loss.squeeze_or_expand_to_same_rank(values, weight)
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
        """Number of elements that the global batch has where this share has `tensor`."""
        per_row = tf.reduce_prod(tf.shape(tensor)[1:])
        return tf.cast(self._replica.total_rows * per_row, dtype or tensor.dtype)


def _has_rows(values: Any, y_pred: Any) -> bool:
    """Whether a loss gave one value, or several, for each row."""
    if values.shape.rank == 0:
        return False
    rows = tf.nest.flatten(y_pred)[0].shape[0]
    return values.shape[0] == rows
