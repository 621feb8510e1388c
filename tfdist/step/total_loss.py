"""What a share of the batch contributes to the total loss of the whole.

The total is made of compiled losses, of losses that layers add, and of penalties on weights. The
contributions of all replicas add up to the number that one device computes.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.step import compiled_loss
from tfdist.step.mean_or_sum import Kind, Kinds
from tfdist.step.replica import Replica


def contribution(
    model: keras.Model,
    replica: Replica,
    batch: tuple[Any, Any, Any],
    y_pred: Any,
    added: list[tf.Tensor],
    kinds: Kinds,
    training: bool,
) -> tf.Tensor:
    """Returns this share's part of the global batch's loss.

    Args:
        model: Compiled.
        replica: Whose share this is.
        batch: `(x, y, sample_weight)` of the share.
        y_pred: The model's output for it.
        added: What `add_loss` and activity regularisers gave.
        kinds: Tells how what user code computes adds up over the shares.
        training: As in `Model.compute_loss`.

    Returns:
        A float scalar; with a loss that is compiled without reduction, a vector whose elements
        are summed.
    """
    x, y, sample_weight = batch
    penalties = [v.regularizer(v) for v in model.trainable_weights if v.regularizer is not None]
    whole = replica.num_parts == 1
    parts = added if whole or not added else _parts(replica, added, kinds, training)
    if whole or type(model).compute_loss is not keras.Model.compute_loss:
        # Each replica counts 1/N of the whole loss, and the way back sums over the replicas.
        override = replica.sum_through(parts) + penalties
        x, y, y_pred_whole, sample_weight = replica.gather((x, y, y_pred, sample_weight))
        compiled_loss.gather_masks(replica, y_pred, y_pred_whole)
        loss = _with_losses(model, override, (x, y, y_pred_whole, sample_weight), training)
        return loss if whole else loss / replica.num_replicas
    losses = parts + [_aggregate(penalty) * replica.fraction for penalty in penalties]
    if model._compile_loss is not None:
        compiled = compiled_loss.on_share(model._compile_loss, replica, kinds)
        losses.insert(0, compiled(y, y_pred, sample_weight))
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


def _parts(replica: Replica, added: list, kinds: Kinds, training: bool) -> list[tf.Tensor]:
    """What the added losses of this share add to the batch's; a mean over no rows is no NaN."""
    values = [tf.where(replica.num_rows > 0, _aggregate(loss), 0.0) for loss in added]
    return [
        value if kind is Kind.SUM else value * replica.fraction
        for value, kind in zip(values, kinds.of_losses(len(added), training), strict=True)
    ]


def _aggregate(loss: tf.Tensor) -> tf.Tensor:
    """As `Model._aggregate_additional_loss`, which also divides by the replicas."""
    return tf.reduce_sum(tf.cast(loss, keras.config.floatx()))
