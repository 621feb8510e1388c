"""How replicas' `tf.IndexedSlices`, the gradients of embeddings, combine to those of the batch.

One device has a slice for each lookup, even of the same row, and most optimizers distinguish
several slices of a row from their sum. Which of the three kinds of `LookupKind` an embedding has
follows from the static analysis (`analysis.py`) of the indices of its slices.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.rows.analysis import RowAnalysis
from tfdist.rows.dependence import Kind
from tfdist.rows.keras_layers import has_only_row_by_row_layers
from tfdist.rows.traced import TracedForward
from tfdist.upstream.keras_losses import total_loss
from tfdist.upstream.keras_model import call_model, logits_of, overrides
from tfdist.upstream.keras_variables import each_piece


class LookupKind(enum.Enum):
    """How the slices of all replicas make those of the global batch."""

    #: The rows of the batch decide what is looked up: slices are concatenated.
    PER_ROW = "per row"
    #: Every replica looks up the same rows (positions in a sequence, relative positions, or what
    #: `compute_loss` looks up for the full batch): one device has these slices once, so their
    #: values are summed.
    ALIKE = "alike"
    #: One device has each row once (a sparse input times a matrix): slices are concatenated, and
    #: those of the same row summed.
    UNIQUE = "unique"
    #: Several of these, or unknown.
    MIXED = "mixed"


def kind_of_lookups(indices: tf.Tensor, analysis: RowAnalysis) -> LookupKind:
    """Returns the kind of the lookups that a gradient has slices for."""
    value = analysis.of(indices)
    if value.is_plain:
        return LookupKind.ALIKE
    if value.kind is Kind.ROWS and not value.power:
        return LookupKind.PER_ROW
    if indices.op.type in ("Cast", "Identity", "Reshape"):  # the order does not matter
        return kind_of_lookups(indices.op.inputs[0], analysis)
    if indices.op.type in ("Unique", "UniqueV2"):
        is_mixed = analysis.of(indices.op.inputs[0]).kind is Kind.MIXED
        return LookupKind.MIXED if is_mixed else LookupKind.UNIQUE
    if indices.op.type == "ConcatV2":  # of several lookups
        kinds = {kind_of_lookups(part, analysis) for part in list(indices.op.inputs)[:-1]}
        return kinds.pop() if kinds == {LookupKind.PER_ROW} else LookupKind.MIXED
    return LookupKind.MIXED


class Lookups:
    """Knows which rows a model looks up in its embeddings.

    Args:
        model: A built model.
        first_batch: Returns the first global batch, for its shapes and dtypes. Called outside of
            any graph, and only for a model that has `tf.IndexedSlices` among its gradients, or
            that may mix different lookups.
    """

    def __init__(self, model: keras.Model, first_batch: Callable[[], Any]) -> None:
        self._model, self._first_batch = model, first_batch
        self._kinds: dict[int, LookupKind] = {}
        self._reason: str | None = None
        self._is_known = False

    def are_alike(self, place: int) -> bool:
        """Returns whether every replica looks up the same rows of an embedding.

        Args:
            place: Number of the embedding among the trainable variables.

        Raises:
            UnsupportedModelError: That differs between lookups, or is not known.
        """
        if not self._is_known:
            self._find()
        kind = self._kinds.get(place, LookupKind.MIXED)
        if kind is not LookupKind.MIXED:
            return kind is LookupKind.ALIKE
        reason = self._reason or _reason(self._model.trainable_variables[place])
        raise UnsupportedModelError(
            f"Replicas cannot combine their gradients: {reason}. Use one embedding for each kind "
            "of lookup, or keras.ops.one_hot and a matrix product, or one device."
        )

    def full_batch_reason(self) -> str | None:
        """Returns why replicas cannot combine the lookups of their rows; None if they can."""
        if not self._is_known:
            self._find()
        return self._reason

    def of_batch(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Returns gradients, by place, with one slice per row where one device has one."""
        unique = [i for i in gradients if self._kinds.get(i) is LookupKind.UNIQUE]
        return gradients | {i: each_piece(_summed_by_row, gradients[i]) for i in unique}

    def _find(self) -> None:
        self._is_known = True
        tables = self._model.trainable_variables
        with tf.init_scope():
            x, y, weight = keras.utils.unpack_x_y_sample_weight(self._first_batch())
            has_sparse = any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(x))
            if has_only_row_by_row_layers(self._model) and not has_sparse:
                self._kinds = dict.fromkeys(range(len(tables)), LookupKind.PER_ROW)
                return
            batch = (x, y, weight) if overrides(self._model, "compute_loss") else (x, None, None)
            try:
                gradients = _Gradients(self._model, batch)
            except ValueError as error:
                self._reason = f"the lookups in embeddings are not known, because {error}"
                return
        self._kinds = gradients.kinds()
        mixed = [i for i, kind in self._kinds.items() if kind is LookupKind.MIXED]
        if mixed:
            self._reason = _reason(tables[mixed[0]], gradients.analysis)


class _Gradients:
    """The `tf.IndexedSlices` of a model's gradients, traced with any number of rows.

    Raises:
        ValueError: The model cannot be traced.
    """

    def __init__(self, model: keras.Model, batch: Any) -> None:
        self._model = model
        self._of_call: dict[int, tf.Tensor] = {}
        self._of_loss: dict[int, tf.Tensor] = {}
        self._is_sparse = [isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(batch)]
        self._traced = TracedForward(model, batch, training=True, compute=self._compute)
        self.analysis = self._traced.analysis

    def kinds(self) -> dict[int, LookupKind]:
        """Returns the kind of the lookups in each embedding, by its place."""
        kinds = {i: kind_of_lookups(each, self.analysis) for i, each in self._of_call.items()}
        for place in self._of_loss:  # every replica computes the loss of the full batch
            is_one = kinds.get(place, LookupKind.ALIKE) is LookupKind.ALIKE
            kinds[place] = LookupKind.ALIKE if is_one else LookupKind.MIXED
        return kinds

    def _compute(self, batch: Any) -> None:
        leaves = [
            tf.sparse.from_dense(leaf) if is_sparse else leaf
            for leaf, is_sparse in zip(tf.nest.flatten(batch), self._is_sparse, strict=True)
        ]
        x, y, weight = tf.nest.pack_sequence_as(batch, leaves)
        model, tables = self._model, self._model.trainable_variables
        values = [tf.identity(table) for table in tables]
        with keras.StatelessScope(zip(tables, values, strict=True), collect_losses=True) as scope:
            y_pred = call_model(model, x, training=True)
            outputs = [*tf.nest.flatten(y_pred), *scope.losses]
            current = [scope.get_current_value(table) for table in tables]
            self._of_call = _indices([t for t in outputs if t.dtype.is_floating], current)
            if overrides(model, "compute_loss"):
                loss = total_loss(model, scope.losses, (x, y, y_pred, weight), training=True)
                logits = [logits_of(each) for each in outputs]
                stops = outputs + [each for each in logits if each is not None]
                self._of_loss = _indices([loss], current, stops)


def _indices(
    targets: list[tf.Tensor], tables: list[tf.Tensor], known: list[tf.Tensor] | None = None
) -> dict[int, tf.Tensor]:
    """Returns the indices of the slices in the gradients of tables, by their place.

    Args:
        targets: What is differentiated.
        tables: Values of all trainable variables.
        known: Tensors that the backward pass does not go through.
    """
    # `tf.gradients`, because tapes do not record in an init_scope.
    gradients = tf.gradients(targets, tables, stop_gradients=known)
    return {i: g.indices for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)}


def _reason(table: keras.Variable, analysis: RowAnalysis | None = None) -> str:
    if analysis is not None and analysis.unknown:
        return f"what is looked up in {table.path!r} {analysis.unknown_operations()}"
    return f"some lookups in {table.path!r} depend on the rows of the batch and others do not"


def _summed_by_row(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums the slices of each row, in the order in which the rows first occur."""
    rows, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)
