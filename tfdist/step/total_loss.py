"""What a share of the batch contributes to the total loss of the whole.

The total is made of compiled losses, of losses that layers add, and of penalties on weights. The
contributions of all replicas add up to the number that one device computes.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.step import compiled_loss
from tfdist.step.aggregation import Aggregation
from tfdist.step.mean_or_sum import Aggregations
from tfdist.step.replica import Replica
from tfdist.upstream.keras_losses import compile_loss, total_loss


def of_share(
    model: keras.Model,
    replica: Replica,
    batch: tuple[Any, Any, Any],
    y_pred: Any,
    added: list[tf.Tensor],
    aggregations: Aggregations,
    training: bool,
) -> tf.Tensor:
    """Returns this share's part of the global batch's loss.

    Args:
        model: Compiled.
        replica: Whose share this is.
        batch: `(x, y, sample_weight)` of the share.
        y_pred: The model's output for it.
        added: What `add_loss` and activity regularisers gave.
        aggregations: Tells how what user code computes adds up over the shares.
        training: As in `Model.compute_loss`.

    Returns:
        A float scalar; with a loss that is compiled without reduction, a vector whose elements
        are summed.
    """
    x, y, sample_weight = batch
    penalties = [v.regularizer(v) for v in model.trainable_weights if v.regularizer is not None]
    whole = replica.num_microbatches == 1
    if added and not whole:
        added = _of_batch(replica, added, aggregations, training)
    if whole or type(model).compute_loss is not keras.Model.compute_loss:
        # Each replica counts 1/N of the whole loss, and the way back sums over the replicas.
        instead = replica.sum_through(added) + penalties
        gathered = replica.gather((x, y, y_pred, sample_weight))
        compiled_loss.gather_marks(replica, y_pred, gathered[2])
        loss = total_loss(model, instead, gathered, training)
        return loss if whole else loss / replica.num_replicas
    losses = added + [_by_rows(_aggregate(penalty), replica) for penalty in penalties]
    if compile_loss(model) is not None:
        compiled = compiled_loss.on_share(compile_loss(model), replica, aggregations)
        losses.insert(0, compiled(y, y_pred, sample_weight))
    if not losses:
        raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
    if len(losses) == 1:
        return losses[0]
    dtype = tf.float64 if any(v.dtype == tf.float64 for v in losses) else tf.float32
    return tf.add_n([tf.cast(v, dtype) for v in losses])


def track(tracker: keras.metrics.Mean, loss: tf.Tensor, replica: Replica) -> None:
    """Counts the loss of a batch once, weighted by its rows, from the share of every replica."""
    rows = tf.cast(replica.total_rows, tracker.dtype)
    if loss.shape.rank:  # compiled without reduction: Keras logs the mean of the vector
        per_row = tf.cast(tf.reduce_prod(tf.shape(loss)[1:]), tracker.dtype)
        loss = tf.reduce_sum(tf.cast(loss, tracker.dtype)) / (rows * per_row)
    num_times = replica.num_microbatches  # that the one loss is counted
    tracker.update_state(loss * num_times, sample_weight=rows / num_times)


def _of_batch(
    replica: Replica, added: list, aggregations: Aggregations, training: bool
) -> list[tf.Tensor]:
    """What the added losses of this share add to the batch's; a mean over no rows is no NaN."""
    values = [replica.if_counted(_aggregate(loss)) for loss in added]
    how = aggregations.of_losses(len(added), training)
    return [
        value if each is Aggregation.SUM else _by_rows(value, replica)
        for value, each in zip(values, how, strict=True)
    ]


def _by_rows(value: tf.Tensor, replica: Replica) -> tf.Tensor:
    """Of what is the same, or a mean, on every share: what this one's rows count for."""
    return value * tf.cast(replica.fraction, value.dtype)


def _aggregate(loss: tf.Tensor) -> tf.Tensor:
    """As `Model._aggregate_additional_loss`, which also divides by the replicas."""
    return tf.reduce_sum(tf.cast(loss, keras.config.floatx()))
