"""Rows that a model looks up in its tables, whose gradients are `tf.IndexedSlices`.

One device has a slice for each lookup, also of the same row, and most optimizers tell slices of one
row from their sum. What the rows of a batch look up is each share's own: the slices of all shares,
end to end, are those of the batch. What does not depend on them (the positions in a sequence, a
table of relative positions) every share looks up alike: the batch has those slices once, with the
sums of their values. And where a sparse input is multiplied by a matrix, one device has a slice for
each column that the batch has, once: what several shares have of a column is added up. Which of
the three a table is, is asked once, on the first batch.
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
from tfdist.step.reductions import halves
from tfdist.strategies import batches
from tfdist.upstream.keras_model import takes_training
from tfdist.upstream.keras_variables import each_piece


class Kind(enum.Enum):
    """How the slices of shares make those of the batch."""

    OWN = "laid end to end"
    ALIKE = "the same rows on every share, of which the values are summed"
    ONCE = "laid end to end, those of one row added up"


class Lookups:
    """Answers, for one model, whose rows its tables look up.

    Args:
        model: Built.
        first_batch: Returns the first global batch; called outside of any graph, and only for a
            model with gradients that are slices.
    """

    def __init__(self, model: keras.Model, first_batch: Callable[[], Any]) -> None:
        self._model, self._first_batch = model, first_batch
        self._indices: list[dict[int, tf.Tensor]] = []
        self._has_sparse = False
        self._kinds: dict[int, Kind] = {}

    def are_alike(self, place: int) -> bool:
        """Tells whether the rows of a table that are looked up are the same for every share.

        Args:
            place: Of the table among the trainable variables.

        Raises:
            UnsupportedModelError: Some are, and some are not.
        """
        if place not in self._kinds:
            self._kinds[place] = self._asked(place)
        return self._kinds[place] is Kind.ALIKE

    def of_batch(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Returns gradients, by place, with the slices that one device has once added up."""
        once = [i for i in gradients if self._kinds.get(i) is Kind.ONCE]
        return gradients | {i: each_piece(_added_up, gradients[i]) for i in once}

    def _asked(self, place: int) -> Kind:
        if not self._indices:
            with tf.init_scope():
                x = keras.utils.unpack_x_y_sample_weight(self._first_batch())[0]
                self._has_sparse = any(isinstance(t, tf.SparseTensor) for t in tf.nest.flatten(x))
                looked_up = functools.partial(_looked_up, self._model, x)
                of_rows = tf.function(looked_up, autograph=False)
                self._indices = [of_rows(*map(tf.constant, part)) for part in halves(x)]
        if place in self._indices[-1]:
            first, second, both = (np.asarray(found[place]) for found in self._indices)
            is_union = len(set(both)) == len(both) and {*first, *second} == {*both}
            # Columns of halves may be the same, or have none in common, by chance.
            if is_union and self._has_sparse:
                return Kind.ONCE
            if len(first) + len(second) == len(both):
                return Kind.OWN
            if np.array_equal(first, both) and np.array_equal(second, both):
                return Kind.ALIKE
            if is_union:
                return Kind.ONCE
        table = self._model.trainable_variables[place].path
        raise UnsupportedModelError(
            f"{table!r} is a table in which the rows of a batch look up neither entries of their "
            "own nor all the same: use a table for each of both, keras.ops.one_hot and a matrix "
            "product, or one device."
        )


def _added_up(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the slices of each row, in the order in which the rows come first."""
    rows, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)


def _looked_up(
    model: keras.Model, x: Any, begin: tf.Tensor, end: tf.Tensor
) -> dict[int, tf.Tensor]:
    """Returns the indices of all lookups in a forward pass, by the place of the table.

    To be traced: all else that a gradient takes is left out when this is run.
    """
    tables = model.trainable_variables
    values = [tf.identity(table) for table in tables]
    with keras.StatelessScope(zip(tables, values, strict=True), collect_losses=True) as scope:
        rows = batches.take(x, begin, end)
        outputs = model(rows, training=False) if takes_training(model) else model(rows)
    # Recording on a tape is off in the scope in which first batches are looked at.
    targets = [t for t in tf.nest.flatten(outputs) + scope.losses if t.dtype.is_floating]
    gradients = enumerate(tf.gradients(targets, [scope.get_current_value(v) for v in tables]))
    return {i: g.indices for i, g in gradients if isinstance(g, tf.IndexedSlices)}
