"""What a share of the batch contributes to a step: its forward pass, and its backward pass.

Plain functions of a replica and its rows, in which no variable changes. Whatever they return is a
sum over the rows, or is the same on every share: so contributions add up, over microbatches and
over replicas, to what one device computes from the whole batch.

Sums over all replicas of structures of tensors; gradients in the format in which they cross.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.groups import buckets
from tfdist.precision import Scaling
from tfdist.step import parameter_gather
from tfdist.step.loss import gather_masks_and_logits, replica_loss, track_loss
from tfdist.step.parameter_gather import Scope
from tfdist.step.replica import Replica
from tfdist.step.state import Changes, ForwardState, nothing_like, same_as
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share
from tfdist.upstream.keras_losses import loss_tracker
from tfdist.upstream.keras_model import takes_training
from tfdist.upstream.keras_variables import each_piece, pieces, shapes_of_pieces


class ReplicaOutputs(NamedTuple):
    """What a share brings to a step, or the sum of what several bring.

    Attributes:
        gradients: Of the scaled loss, by place among the trainable variables; those that the loss
            does not depend on have none. Of slices for rows that all shares look up alike, the
            values.
        state: What the forward pass moved: seeds, statistics, counters.
        metrics: What it moved in the metrics.
        indices: Of the rows that all shares look up alike, by place, in pieces as the gradients.
    """

    gradients: dict[int, Any]
    state: Changes
    metrics: Changes
    indices: dict[int, Any] = {}  # noqa: RUF012 - nobody changes it

    def summable(self) -> ReplicaOutputs:
        """Returns what is to be summed: all but what is the same on every share."""
        state, metrics = (changes._replace(same={}) for changes in (self.state, self.metrics))
        return self._replace(state=state, metrics=metrics, indices={})

    def same(self) -> ReplicaOutputs:
        """Returns the rest, for `with_same`: what is the same on every share."""
        state, metrics = (Changes({}, {}, changes.same) for changes in (self.state, self.metrics))
        return ReplicaOutputs({}, state, metrics, self.indices)

    def of_whole(self, counts: bool, zero: int | tf.Tensor) -> ReplicaOutputs:
        """Returns what a replica brings where each computes the whole batch: all of it, or zeros.

        One replica's counts, exactly as it is; the others get it by the exchange, so that no copy
        of the variables drifts.

        Args:
            counts: Whether this one's does.
            zero: The number, int32.
        """
        gradients = {}
        # Buckets follow the order in which operations make the gradients: one for all replicas.
        for i, gradient in self.gradients.items():
            # Other zeros each: TensorFlow makes one of two sums of the same, and Horovod waits.
            nothing = functools.partial(nothing_like, zero=zero * (i + 1))
            gradients[i] = each_piece(same_as if counts else nothing, gradient)
        state, metrics = self.state.crossing(), self.metrics.crossing()
        if not counts:
            state, metrics = state.nothing(zero), metrics.nothing(zero)
        return self._replace(gradients=gradients, state=state, metrics=metrics)

    def with_same(self, share: ReplicaOutputs) -> ReplicaOutputs:
        """Returns sums together with what a share had in common with all others."""
        return self._replace(
            state=self.state._replace(same=share.state.same),
            metrics=self.metrics._replace(same=share.metrics.same),
            indices=share.indices,
        )

    def gradients_of(self, trainable: list[keras.Variable]) -> dict[int, Any]:
        """Returns the gradients of variables, by place: tensors and `tf.IndexedSlices`."""
        slices = {}
        for i, rows in self.indices.items():
            shapes = shapes_of_pieces(self.gradients[i], trainable[i])
            slices[i] = each_piece(
                lambda values, rows, shape: tf.IndexedSlices(values, rows, tf.constant([*shape])),
                self.gradients[i],
                pieces(rows),
                shapes,
            )
        return self.gradients | slices


def forward(
    model: keras.Model, state: ForwardState, replica: Replica, share: Share
) -> ReplicaOutputs:
    """Returns what a share adds to loss and metrics; nothing is trained."""
    with state.scope(replica) as scope, replica:
        batch, y_pred = _outputs(model, state, replica, share, scope, training=False)
        loss = replica_loss(
            model, replica, batch, y_pred, scope.losses, state.reductions, training=False
        )
        _update_metrics(model, state, replica, scope, batch, y_pred, loss)
    return ReplicaOutputs({}, *state.changes(scope, replica))


def forward_backward(
    strategy: Strategy,
    model: keras.Model,
    trainable: list[keras.Variable],
    state: ForwardState,
    scaling: Scaling,
    replica: Replica,
    share: Share,
) -> ReplicaOutputs:
    """Returns the gradients of a share's part of the loss, and all else that it adds."""
    with state.scope(replica) as scope, replica:
        with tf.GradientTape() as tape:
            scope.joins.tape = tape
            batch, y_pred = _outputs(model, state, replica, share, scope, training=True)
            loss = replica_loss(
                model, replica, batch, y_pred, scope.losses, state.reductions, training=True
            )
            scaled = scaling.scale(loss)
        sources = [scope.source(v) for v in trainable]
        with scope.joins.gradients():
            found = strategy.gradients(tape, scaled, sources)
        gradients = enumerate(
            parameter_gather.total(g, v) if isinstance(g, list) else g
            for g, v in zip(found, trainable, strict=True)
        )
        _update_metrics(model, state, replica, scope, batch, y_pred, loss)
    connected = {i: shaped(g, trainable[i]) for i, g in gradients if g is not None}
    indices = {}
    for i, gradient in connected.items():
        if not isinstance(pieces(gradient)[0], tf.IndexedSlices):
            continue
        strategy.check_table(trainable[i])
        if replica.num_microbatches > 1 and state.lookups.are_alike(i):
            connected[i] = each_piece(lambda own: own.values, gradient)
            indices[i] = each_piece(lambda own: own.indices, gradient)
    return ReplicaOutputs(connected, *state.changes(scope, replica), indices)


def shaped(gradient: Any, variable: keras.Variable) -> Any:
    """Returns the gradient of a variable, of which TensorFlow may not know that shape itself."""

    def of_piece(own: Any, shape: Sequence[int]) -> Any:
        if isinstance(own, tf.IndexedSlices):
            own.values.set_shape([None, *shape[1:]])
            return tf.IndexedSlices(own.values, own.indices, tf.constant([*shape]))
        own.set_shape(shape)
        return own

    return each_piece(of_piece, gradient, shapes_of_pieces(gradient, variable))


def exchange(
    strategy: Strategy, share: ReplicaOutputs, variables: Sequence[keras.Variable] = ()
) -> ReplicaOutputs:
    """Adds up the contributions of all replicas; called on a replica.

    Args:
        strategy: Of the replicas.
        share: What this one brings.
        variables: What the gradients are of, by place.
    """
    in_parts = strategy.reduce_sharded(share.gradients, variables)
    whole = {i: g for i, g in share.gradients.items() if i not in in_parts}
    rest = share.summable()._replace(gradients={})
    gradients, sums = gradients_and(strategy, whole, rest)
    return sums._replace(gradients=gradients | in_parts).with_same(share)


def _outputs(
    model: keras.Model,
    state: ForwardState,
    replica: Replica,
    share: Share,
    scope: Scope,
    training: bool,
) -> tuple[tuple[Any, Any, Any], Any]:
    """Calls the model as Keras's own steps do.

    Returns:
        Inputs, labels and weights, and the model's output for them; also of a row that stands in.
    """
    batch = keras.utils.unpack_x_y_sample_weight(share.rows)
    with state.counting(scope, replica):
        x = batch[0]
        y_pred = model(x, training=training) if takes_training(model) else model(x)
    return batch, y_pred


def _update_metrics(
    model: keras.Model,
    state: ForwardState,
    replica: Replica,
    scope: Scope,
    batch: tuple[Any, Any, Any],
    y_pred: Any,
    loss: tf.Tensor,
) -> None:
    """Counts this share, or the whole batch for metrics that are no sums over rows."""
    track_loss(loss_tracker(model), loss, replica)
    x, y, sample_weight = batch
    if state.sees_whole_batches(replica):
        share_pred = y_pred
        x, y, y_pred, sample_weight = replica.gather((x, y, y_pred, sample_weight))
        gather_masks_and_logits(replica, share_pred, y_pred)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return
    with state.counting(scope, replica):
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def all_reduced(strategy: Strategy, structure: Any) -> Any:
    """Sums each tensor of a structure over all replicas, in one exchange; called on a replica."""
    return tf.nest.pack_sequence_as(structure, strategy.all_reduce(tf.nest.flatten(structure)))


def gradients_and(
    strategy: Strategy, gradients: Mapping[int, Any], rest: Any
) -> tuple[dict[int, Any], Any]:
    """Sums gradients over all replicas, bucket by bucket, and a structure with the last of them.

    Called on a replica.

    Args:
        strategy: Of the replicas; says how large buckets are, and in what format they cross.
        gradients: By place: dense tensors or `tf.IndexedSlices`; the same on every replica.
        rest: What is to be summed else.
    """
    wire = strategy.wire_dtype
    sent = {i: g if wire is None else tf.cast(g, wire) for i, g in gradients.items()}
    places = buckets.in_order(gradients, strategy.bucket_bytes)
    # Lists, since `tf.nest` would put the keys of a dictionary into an order of its own.
    *first, last = [[sent[i] for i in bucket] for bucket in places]
    *summed, (of_last, rest) = buckets.each(
        functools.partial(all_reduced, strategy),
        [*first, (last, rest)],
        strategy.bucket_bytes,
        strategy.buckets_wait,
    )
    totals = buckets.by_place(places, [*summed, of_last])
    return {i: tf.cast(total, gradients[i].dtype) for i, total in totals.items()}, rest
