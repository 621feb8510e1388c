"""The forward and the backward pass of one replica, and the all-reduce of what they compute.

`forward` and `forward_backward` are plain functions of a replica and its rows, and change no
variable. Everything they return is either a sum over the rows or the same on every replica.
Therefore the outputs of microbatches and replicas add up to what one device computes from the
global batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.groups import buckets
from tfdist.patches.offload import activations_on_host
from tfdist.replica.replica import Replica
from tfdist.replica.scope import Scope
from tfdist.step.loss import gather_masks_and_logits, replica_loss, track_loss
from tfdist.step.loss_scaling import Scaling
from tfdist.step.state import Changes, ForwardState, copied, zeros_beside
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import Share
from tfdist.upstream.keras_losses import loss_tracker
from tfdist.upstream.keras_model import call_model, overrides
from tfdist.upstream.keras_variables import each_piece, pieces, shapes_of_pieces


class ReplicaOutputs(NamedTuple):
    """What one replica computes in a step, or the sum of what several compute.

    Attributes:
        gradients: Gradients of the scaled loss, by place among the trainable variables. Variables
            that the loss does not depend on are left out. For an embedding of which all replicas
            look up the same rows, only the values of its `tf.IndexedSlices`.
        state: Changes of the model's state: seeds, moving statistics, counters.
        metrics: Changes of the metrics' state.
        indices: The rows of embeddings that all replicas look up alike, by place, in as many
            pieces as the gradients.
        overwritten: The new values of variables that Keras overwrites with maxima over the batch
            (float8), by place: those of all microbatches one below the other, zeros for others'.
        packed: Of a shared trace: all that is to be summed over the replicas, concatenated to few
            tensors. Then the rest has only what is the same on every replica.
    """

    gradients: dict[int, Any]
    state: Changes
    metrics: Changes
    indices: dict[int, Any] = {}  # noqa: RUF012 - never modified
    overwritten: dict[int, Any] = {}  # noqa: RUF012 - never modified
    packed: list[tf.Tensor] = []  # noqa: RUF012 - never modified

    def summable(self) -> ReplicaOutputs:
        """Returns the part to sum over replicas, without what is the same on every replica."""
        state, metrics = (changes._replace(same={}) for changes in (self.state, self.metrics))
        return self._replace(state=state, metrics=metrics, indices={})

    def same(self) -> ReplicaOutputs:
        """Returns the part that is the same on every replica, for `with_same`."""
        state, metrics = (Changes({}, {}, changes.same) for changes in (self.state, self.metrics))
        return ReplicaOutputs({}, state, metrics, self.indices)

    def with_same(self, other: ReplicaOutputs) -> ReplicaOutputs:
        """Returns sums together with the part of `other` that is the same on every replica."""
        return self._replace(
            state=self.state._replace(same=other.state.same),
            metrics=self.metrics._replace(same=other.metrics.same),
            indices=other.indices,
        )

    def of_full_batch(
        self, counts: bool, zero: int | tf.Tensor, here: bool = False
    ) -> ReplicaOutputs:
        """Returns what a replica adds to the sums in full-batch mode: everything, or zeros.

        Only the first replica's results count. The others receive them through the all-reduce, so
        that no copy of the variables drifts.

        Args:
            counts: Whether this replica's results count.
            zero: The number 0, int32.
            here: Whether the zeros are for another replica, on the current device.
        """
        gradients, copy = {}, functools.partial(copied, zero=zero)
        # Buckets follow the order of the operations that compute the gradients, which has to be
        # the same on all replicas.
        for i, gradient in self.gradients.items():
            # Every zero differs: TensorFlow merges two equal all-reduces into one, and Horovod
            # would wait for the other.
            zeros = functools.partial(zeros_beside, zero=zero * (i + 1), here=here)
            gradients[i] = each_piece(copy if counts else zeros, gradient)
        state, metrics = self.state.reduced_floats(), self.metrics.reduced_floats()
        overwritten = self.overwritten
        if not counts:
            state, metrics = state.zeros(zero, here), metrics.zeros(zero, here)
            overwritten = {i: zeros_beside(new, zero, here) for i, new in overwritten.items()}
        return self._replace(
            gradients=gradients, state=state, metrics=metrics, overwritten=overwritten
        )

    def with_static_shapes(self, variables: Sequence[keras.Variable]) -> ReplicaOutputs:
        """Returns the outputs with slices of known shape, which functions do not return."""
        return self._replace(
            gradients={
                i: with_static_shape(g, variables[i]) if isinstance(g, tf.IndexedSlices) else g
                for i, g in self.gradients.items()
            }
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

    def maxima(self) -> dict[int, tf.Tensor]:
        """Returns the new values of variables that are overwritten: the largest of those of all."""
        return {i: tf.reduce_max(values, 0) for i, values in self.overwritten.items()}


def forward(
    model: keras.Model, state: ForwardState, replica: Replica, share: Share
) -> ReplicaOutputs:
    """Returns what a replica adds to loss and metrics, without gradients."""
    with state.scope(replica) as scope, replica:
        batch, y_pred = _call_model(model, state, replica, share, scope, training=False)
        loss = replica_loss(model, replica, batch, y_pred, scope.losses, state.rows, training=False)
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
    offload: bool = False,
) -> ReplicaOutputs:
    """Returns the gradients of a replica's part of the loss, and its changes of the state.

    With `offload`, activations are on the host between the two passes.
    """
    with state.scope(replica) as scope, replica:
        with scope.recorded() as tape:
            batch, y_pred = _call_model(model, state, replica, share, scope, training=True)
            loss = replica_loss(
                model, replica, batch, y_pred, scope.losses, state.rows, training=True
            )
            scaled = scaling.scale(loss)
        alone = replica.num_replicas == 1
        compute = functools.partial(strategy.gradients, tape, scaled, alone=alone)
        with activations_on_host() if offload else contextlib.nullcontext():
            gradients = scope.gradients(compute, trainable)
        overwritten = {
            i: replica.beside_others(gradients[i])
            for i, variable in enumerate(trainable)
            if variable.overwrite_with_gradient and gradients[i] is not None
        }
        _update_metrics(model, state, replica, scope, batch, y_pred, loss)
    connected = {
        i: with_static_shape(g, trainable[i])
        for i, g in enumerate(gradients)
        if g is not None and i not in overwritten
    }
    if scaling.active and replica.num_microbatches > 1:
        scaling.note_parts(connected)
    indices = {}
    for i, gradient in connected.items():
        if not isinstance(pieces(gradient)[0], tf.IndexedSlices):
            continue
        strategy.variables.check_table(trainable[i])
        if replica.num_microbatches > 1 and state.rows.lookups.are_alike(i):
            connected[i] = each_piece(lambda slices: slices.values, gradient)
            indices[i] = each_piece(lambda slices: slices.indices, gradient)
    return ReplicaOutputs(connected, *state.changes(scope, replica), indices, overwritten)


def with_static_shape(gradient: Any, variable: keras.Variable) -> Any:
    """Returns a gradient with the static shape of its variable, which TensorFlow may not know."""

    def of_piece(piece: Any, shape: Sequence[int]) -> Any:
        if isinstance(piece, tf.IndexedSlices):
            piece.values.set_shape([None, *shape[1:]])
            return tf.IndexedSlices(piece.values, piece.indices, tf.constant([*shape]))
        piece.set_shape(shape)
        return piece

    return each_piece(of_piece, gradient, shapes_of_pieces(gradient, variable))


def all_reduce_outputs(
    strategy: Strategy, outputs: ReplicaOutputs, variables: Sequence[keras.Variable]
) -> ReplicaOutputs:
    """Sums the outputs of all replicas; called on a replica."""
    if outputs.packed:
        return outputs._replace(packed=strategy.all_reduce(outputs.packed))
    sharded = strategy.variables.reduce_sharded(outputs.gradients, variables)
    dense = {i: g for i, g in outputs.gradients.items() if i not in sharded}
    rest = outputs.summable()._replace(gradients={})
    gradients, sums = all_reduce_gradients(strategy, dense, rest)
    return sums._replace(gradients=gradients | sharded).with_same(outputs)


def all_reduce(strategy: Strategy, structure: Any) -> Any:
    """Sums each tensor of a structure over all replicas, in one exchange; called on a replica."""
    return tf.nest.pack_sequence_as(structure, strategy.all_reduce(tf.nest.flatten(structure)))


def all_reduce_gradients(
    strategy: Strategy, gradients: Mapping[int, Any], rest: Any
) -> tuple[dict[int, Any], Any]:
    """Sums gradients over all replicas in buckets, and a structure with the last bucket.

    Called on a replica.

    Args:
        strategy: Runs the replicas; has the size of a bucket and the dtype of the exchange.
        gradients: By place: dense tensors or `tf.IndexedSlices`, the same places on every replica.
        rest: Any structure of tensors to sum as well.
    """
    wire = strategy.exchange.wire_dtype
    sent = {i: g if wire is None else tf.cast(g, wire) for i, g in gradients.items()}
    places = buckets.in_order(gradients, strategy.exchange.bucket_bytes)
    # Lists, because `tf.nest` sorts the keys of a dictionary.
    *first, last = [[sent[i] for i in bucket] for bucket in places]
    *summed, (of_last, rest) = buckets.each(
        functools.partial(all_reduce, strategy),
        [*first, (last, rest)],
        strategy.exchange.bucket_bytes,
        strategy.group.sums_in_order,
    )
    totals = buckets.by_index(places, [*summed, of_last])
    return {i: tf.cast(total, gradients[i].dtype) for i, total in totals.items()}, rest


def _call_model(
    model: keras.Model,
    state: ForwardState,
    replica: Replica,
    share: Share,
    scope: Scope,
    training: bool,
) -> tuple[tuple[Any, Any, Any], Any]:
    """Calls the model as Keras's own steps do.

    Returns:
        Inputs, labels, and weights; and the model's outputs for them. A padding row has outputs
        too.
    """
    batch = keras.utils.unpack_x_y_sample_weight(share.rows)
    with state.counting(scope, replica):
        return batch, call_model(model, batch[0], training)


def _update_metrics(
    model: keras.Model,
    state: ForwardState,
    replica: Replica,
    scope: Scope,
    batch: tuple[Any, Any, Any],
    y_pred: Any,
    loss: tf.Tensor,
) -> None:
    """Updates metrics with this replica's rows, or with all rows where a metric needs them."""
    track_loss(loss_tracker(model), loss, replica)
    x, y, sample_weight = batch
    if state.needs_full_batch(replica):
        local_pred = y_pred
        x = x if overrides(model, "compute_metrics") else None  # it may hold strings
        x, y, y_pred, sample_weight = replica.gather((x, y, y_pred, sample_weight))
        gather_masks_and_logits(replica, local_pred, y_pred)
        with replica.full_batch():
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return
    with state.counting(scope, replica):
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
