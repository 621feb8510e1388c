"""How replicas' `tf.IndexedSlices`, the gradients of embeddings, combine to those of the batch.

One device has a slice for each lookup, even of the same row, and most optimizers distinguish
several slices of a row from their sum. Which of the three kinds of `LookupKind` an embedding has is
inferred once, from the numbers of slices for both halves of the first batch, and for all of it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.strategies import batches
from tfdist.upstream.keras_model import takes_training
from tfdist.upstream.keras_variables import each_piece

#: Most rows of the first batch that are looked at.
_MAX_ROWS = 64


class LookupKind(enum.Enum):
    """How the slices of all replicas make those of the global batch."""

    #: The rows of the batch decide what is looked up: slices are concatenated.
    PER_ROW = "per row"
    #: Every replica looks up the same rows (positions in a sequence, relative positions): one
    #: device has these slices once, so their values are summed.
    ALIKE = "alike"
    #: One device has each row once (a sparse input times a matrix): slices are concatenated, and
    #: those of the same row summed.
    UNIQUE = "unique"


class Lookups:
    """Knows which rows a model looks up in its embeddings.

    Args:
        model: A built model.
        first_batch: Returns the first global batch. Called outside of any graph, and only for a
            model that has `tf.IndexedSlices` among its gradients.
    """

    def __init__(self, model: keras.Model, first_batch: Callable[[], Any]) -> None:
        self._model, self._first_batch = model, first_batch
        self._indices: list[dict[int, tf.Tensor]] = []
        self._has_sparse = False
        self._kinds: dict[int, LookupKind] = {}

    def are_alike(self, place: int) -> bool:
        """Returns whether every replica looks up the same rows of an embedding.

        Args:
            place: Number of the embedding among the trainable variables.

        Raises:
            UnsupportedModelError: Some of the rows are the same on every replica, others are not.
        """
        if place not in self._kinds:
            self._kinds[place] = self._find(place)
        return self._kinds[place] is LookupKind.ALIKE

    def of_batch(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Returns gradients, by place, with one slice per row where one device has one."""
        unique = [i for i in gradients if self._kinds.get(i) is LookupKind.UNIQUE]
        return gradients | {i: each_piece(_summed_by_row, gradients[i]) for i in unique}

    def _find(self, place: int) -> LookupKind:
        if not self._indices:
            # On no particular device: what a function returns there could not be read here.
            with tf.init_scope(), tf.device(None):
                x = keras.utils.unpack_x_y_sample_weight(self._first_batch())[0]
                self._has_sparse = any(isinstance(t, tf.SparseTensor) for t in tf.nest.flatten(x))
                looked_up = functools.partial(_looked_up, self._model, x)
                of_rows = tf.function(looked_up, autograph=False)
                self._indices = [of_rows(*map(tf.constant, part)) for part in _halves(x)]
        if place in self._indices[-1]:
            first, second, both = (np.asarray(found[place]) for found in self._indices)
            is_union = len(set(both)) == len(both) and {*first, *second} == {*both}
            # Two halves may have the same columns, or none in common, by chance.
            if is_union and self._has_sparse:
                return LookupKind.UNIQUE
            if len(first) + len(second) == len(both):
                return LookupKind.PER_ROW
            if np.array_equal(first, both) and np.array_equal(second, both):
                return LookupKind.ALIKE
            if is_union:
                return LookupKind.UNIQUE
        table = self._model.trainable_variables[place].path
        raise UnsupportedModelError(
            f"Some lookups in the embedding {table!r} depend on the rows of the batch and others "
            "are the same for every replica. Use one embedding for each of them, or "
            "keras.ops.one_hot and a matrix product, or one device."
        )


def _halves(x: Any) -> list[tuple[int, int]]:
    """Returns the rows of the first half of a batch, the second, and both: from and to.

    Raises:
        UnsupportedModelError: The batch has one row only.
    """
    half = min(int(batches.num_rows(x)), _MAX_ROWS) // 2
    if half == 0:
        raise UnsupportedModelError(
            "A model with embeddings needs a first batch of at least 2 rows, from which tfdist "
            "infers whether all rows look up the same entries. Use a larger batch_size."
        )
    return [(0, half), (half, 2 * half), (0, 2 * half)]


def _summed_by_row(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums the slices of each row, in the order in which the rows first occur."""
    rows, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def _looked_up(
    model: keras.Model, x: Any, begin: tf.Tensor, end: tf.Tensor
) -> dict[int, tf.Tensor]:
    """Returns the indices of all lookups in a forward pass, by the place of the embedding.

    To be traced: TensorFlow then prunes everything else that the gradients need.
    """
    tables = model.trainable_variables
    values = [tf.identity(table) for table in tables]
    with keras.StatelessScope(zip(tables, values, strict=True), collect_losses=True) as scope:
        rows = batches.take(x, begin, end)
        outputs = model(rows, training=False) if takes_training(model) else model(rows)
    # `tf.gradients`, because tapes do not record in an init_scope.
    targets = [t for t in tf.nest.flatten(outputs) + scope.losses if t.dtype.is_floating]
    gradients = enumerate(tf.gradients(targets, [scope.get_current_value(v) for v in tables]))
    return {i: g.indices for i, g in gradients if isinstance(g, tf.IndexedSlices)}
