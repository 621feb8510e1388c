"""The losses that `compile` was given, on a share of the batch.

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

from tfdist.step.mean_or_sum import Aggregations
from tfdist.step.replica import Replica
from tfdist.upstream import keras_losses, keras_model

_MEANS = ("mean", "sum_over_batch_size", "mean_with_sample_weight")


def on_share(compile_loss: Any, replica: Replica, aggregations: Aggregations) -> Any:
    """A view of Keras's `CompileLoss` whose losses and per-output trackers see the global batch."""
    losses = [
        _ShareLoss(loss, replica, functools.partial(aggregations.has_independent_rows, number))
        for number, loss in enumerate(keras_losses.compiled_losses(compile_loss))
    ]
    trackers = [
        _ShareTracker(tracker, replica.num_microbatches)
        for tracker in keras_losses.loss_trackers(compile_loss)
    ]
    return keras_losses.compile_loss_of(compile_loss, losses, trackers)


class _ShareTracker:
    """Feeds what each share has of a value to a `Mean`, which shall count it once a batch."""

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
        return self._reduce(*self._replica.counted((values, sample_weight, mask)))

    def _of_whole(self, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor:
        """The loss of the gathered batch, of which this replica counts 1/N."""
        replica = self._replica
        y_true, whole, sample_weight = replica.gather((y_true, y_pred, sample_weight))
        gather_marks(replica, y_pred, whole)
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


def gather_marks(replica: Replica, shares: Any, wholes: Any) -> None:
    """Gathers what Keras leaves on outputs for losses: masks, and the logits of probabilities."""
    if replica.num_replicas == 1:
        return
    for share, whole in zip(tf.nest.flatten(shares), tf.nest.flatten(wholes), strict=True):
        if (mask := keras_model.mask_of(share)) is not None:
            keras_model.set_mask(whole, replica.gather(mask))
        if (logits := keras_model.logits_of(share)) is not None:
            keras_model.set_logits(whole, replica.gather(logits))
