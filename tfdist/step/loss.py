"""What a share of the batch contributes to the total loss of the whole.

The total is made of compiled losses, of losses that layers add, and of penalties on weights. The
contributions of all replicas add up to the number that one device computes.

The losses that `compile` was given, on a share of the batch.

Keras divides a loss by the rows, mask entries or weights that it sees, and those of a share are
not those of the batch. Here each divisor is the global batch's, so that the contributions of all
replicas add up to the number that one device computes. A loss that is no sum over rows is computed
whole on every replica, from gathered outputs, and counted as 1/N.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.step.reductions import Reduction, ReductionProbe
from tfdist.step.replica import Replica
from tfdist.upstream import keras_losses, keras_model
from tfdist.upstream.keras_losses import compile_loss, total_loss


def replica_loss(
    model: keras.Model,
    replica: Replica,
    batch: tuple[Any, Any, Any],
    y_pred: Any,
    added: list[tf.Tensor],
    reductions: ReductionProbe,
    training: bool,
) -> tf.Tensor:
    """Returns this share's part of the global batch's loss.

    Args:
        model: Compiled.
        replica: Whose share this is.
        batch: `(x, y, sample_weight)` of the share.
        y_pred: The model's output for it.
        added: What `add_loss` and activity regularisers gave.
        reductions: Tells how what user code computes adds up over the shares.
        training: As in `Model.compute_loss`.

    Returns:
        A float scalar; with a loss that is compiled without reduction, a vector whose elements
        are summed.
    """
    x, y, sample_weight = batch
    penalties = [v.regularizer(v) for v in model.trainable_weights if v.regularizer is not None]
    whole = replica.num_microbatches == 1
    if added and not whole:
        added = _of_batch(replica, added, reductions, training)
    if whole or type(model).compute_loss is not keras.Model.compute_loss:
        # Each replica counts 1/N of the whole loss, and the way back sums over the replicas.
        instead = replica.sum_through(added) + penalties
        gathered = replica.gather((x, y, y_pred, sample_weight))
        gather_masks_and_logits(replica, y_pred, gathered[2])
        loss = total_loss(model, instead, gathered, training)
        return loss if whole else loss / replica.num_replicas
    losses = added + [_by_rows(_aggregate(penalty), replica) for penalty in penalties]
    if compile_loss(model) is not None:
        compiled = replica_compile_loss(compile_loss(model), replica, reductions)
        losses.insert(0, compiled(y, y_pred, sample_weight))
    if not losses:
        raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
    if len(losses) == 1:
        return losses[0]
    dtype = tf.float64 if any(v.dtype == tf.float64 for v in losses) else tf.float32
    return tf.add_n([tf.cast(v, dtype) for v in losses])


def track_loss(tracker: keras.metrics.Mean, loss: tf.Tensor, replica: Replica) -> None:
    """Counts the loss of a batch once, weighted by its rows, from the share of every replica."""
    rows = tf.cast(replica.total_rows, tracker.dtype)
    if loss.shape.rank:  # compiled without reduction: Keras logs the mean of the vector
        per_row = tf.cast(tf.reduce_prod(tf.shape(loss)[1:]), tracker.dtype)
        loss = tf.reduce_sum(tf.cast(loss, tracker.dtype)) / (rows * per_row)
    num_times = replica.num_microbatches  # that the one loss is counted
    tracker.update_state(loss * num_times, sample_weight=rows / num_times)


def _of_batch(
    replica: Replica, added: list, reductions: ReductionProbe, training: bool
) -> list[tf.Tensor]:
    """What the added losses of this share add to the batch's; a mean over no rows is no NaN."""
    values = [replica.if_counted(_aggregate(loss)) for loss in added]
    how = reductions.loss_reductions(len(added), training)
    return [
        value if each is Reduction.SUM else _by_rows(value, replica)
        for value, each in zip(values, how, strict=True)
    ]


def _by_rows(value: tf.Tensor, replica: Replica) -> tf.Tensor:
    """Of what is the same, or a mean, on every share: what this one's rows count for."""
    return value * tf.cast(replica.fraction, value.dtype)


def _aggregate(loss: tf.Tensor) -> tf.Tensor:
    """As `Model._aggregate_additional_loss`, which also divides by the replicas."""
    return tf.reduce_sum(tf.cast(loss, keras.config.floatx()))


_MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")


def replica_compile_loss(compile_loss: Any, replica: Replica, reductions: ReductionProbe) -> Any:
    """A view of Keras's `CompileLoss` whose losses and per-output trackers see the global batch."""
    losses = [
        _ShareLoss(loss, replica, functools.partial(reductions.has_independent_rows, number))
        for number, loss in enumerate(keras_losses.compiled_losses(compile_loss))
    ]
    trackers = [
        _ShareTracker(tracker, replica.num_microbatches)
        for tracker in keras_losses.loss_trackers(compile_loss)
    ]
    return keras_losses.compile_loss_of(compile_loss, losses, trackers)


class _ShareTracker:
    """Feeds each replica's part of a value to a `Mean`, which counts it once per batch."""

    def __init__(self, tracker: keras.metrics.Mean, num_shares: int) -> None:
        self._tracker, self._num_shares = tracker, num_shares

    def update_state(self, value: tf.Tensor, sample_weight: Any = None) -> None:
        """Adds a share's; a vector (no reduction) is averaged over its elements as Keras does."""
        del sample_weight
        if value.shape.rank:
            self._tracker.update_state(value)
        else:
            self._tracker.update_state(value * self._num_shares, 1.0 / self._num_shares)


class _ShareLoss:
    """One compiled loss on a share: rows of this replica over divisors of the global batch."""

    def __init__(
        self, loss: keras.losses.Loss, replica: Replica, has_independent_rows: Callable[[], bool]
    ) -> None:
        self._loss, self._replica = loss, replica
        self._has_independent_rows = has_independent_rows

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        loss = self._loss
        if type(loss).__call__ is not keras.losses.Loss.__call__:
            return self._of_whole(y_true, y_pred, sample_weight)

        def as_tensor(value: Any) -> tf.Tensor:
            return keras.ops.convert_to_tensor(value, dtype=loss.dtype)

        in_mask = keras_model.mask_of(y_pred)
        predicted = keras.tree.map_structure(as_tensor, y_pred)
        values = loss.call(keras.tree.map_structure(as_tensor, y_true), predicted)
        if not hasattr(values, "shape"):
            values = as_tensor(values)  # Python's number
        if not (_has_rows(values, predicted) and self._has_independent_rows()):
            return self._of_whole(y_true, y_pred, sample_weight)
        masks = [m for m in (in_mask, keras_model.mask_of(values)) if m is not None]
        mask = (masks[0] & masks[1] if len(masks) == 2 else masks[0]) if masks else None
        values = keras.ops.convert_to_tensor(values, dtype=loss.dtype)
        # User code has had rows in any case; what stood in goes no further.
        return self._reduce(*self._replica.drop_padding((values, sample_weight, mask)))

    def _of_whole(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        """The loss of the gathered batch, of which this replica counts 1/N."""
        replica = self._replica
        y_true, whole, sample_weight = replica.gather((y_true, y_pred, sample_weight))
        gather_masks_and_logits(replica, y_pred, whole)
        return self._loss(y_true, whole, sample_weight) / replica.num_replicas

    def _reduce(self, values: tf.Tensor, weight: Any, mask: Any) -> tf.Tensor:
        """Keras's `reduce_weighted_values`, with divisors of the global batch."""
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
        """Number of elements that the global batch has where this share has `tensor`."""
        per_row = tf.reduce_prod(tf.shape(tensor)[1:])
        return tf.cast(self._replica.total_rows * per_row, dtype or tensor.dtype)


def _has_rows(values: Any, y_pred: Any) -> bool:
    """Whether a loss gave one value, or several, for each row."""
    if values.shape.rank == 0:
        return False
    rows = tf.nest.flatten(y_pred)[0].shape[0]
    return values.shape[0] == rows


def gather_masks_and_logits(replica: Replica, shares: Any, wholes: Any) -> None:
    """Gathers what Keras leaves on outputs for losses: masks, and the logits of probabilities."""
    if replica.num_replicas == 1:
        return
    for share, whole in zip(tf.nest.flatten(shares), tf.nest.flatten(wholes), strict=True):
        if (mask := keras_model.mask_of(share)) is not None:
            keras_model.set_mask(whole, replica.gather(mask))
        if (logits := keras_model.logits_of(share)) is not None:
            keras_model.set_logits(whole, replica.gather(logits))
