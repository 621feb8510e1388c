"""Outputs of several workers are combined unchanged and in the order of the rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.groups.base import LocalGroup
from tfdist.loops.outputs import LocalOutputs, outputs_of_all_workers
from tfdist.strategies.one_device import OneDevice

#: Rows per rank in each of two steps; rank 1 has no rows in the second.
ROWS = ([2, 1], [1, 0])

KINDS = {
    "numbers": tf.constant([[-0.0], [float("nan")], [1.5], [2.5]], tf.float16),
    "flags": tf.constant([True, False, True, False]),
    "words": tf.constant([["a", ""], ["", "bb"], ["c\0", "c"], ["d", "d"]]),
    "bfloat16": tf.constant([[1.0], [2.0], [3.0], [4.0]], tf.bfloat16),
    "ragged": tf.ragged.constant([[1], [], [2, 3], [4]], tf.int64),
    "sparse": tf.sparse.from_dense([[1, 0], [0, 0], [0, 2], [3, 4]]),
}


class Shared(LocalGroup):
    """A group of two ranks that gathers what both have sent."""

    def __init__(self, sent: list[Any]) -> None:
        super().__init__()
        self.sent = sent

    def gather_objects(self, value: Any) -> list[Any]:
        self.sent.append(value)
        return self.sent


def _rows(value: Any, begin: int, size: int) -> Any:
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.slice(value, [begin, 0], [size, 2])
    return value[begin : begin + size]


def _plain(value: Any) -> Any:
    value = tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value
    return value.to_list() if isinstance(value, tf.RaggedTensor) else value.numpy().tolist()


@pytest.mark.parametrize("kinds", [["numbers", "flags", "words", "bfloat16"], [*KINDS]])
def test_combines_rows_unchanged_and_in_order(kinds: list[str]) -> None:
    begins = ([0, 3], [2, 4])
    sent: list[np.ndarray] = []
    for begin, size in zip(begins, ROWS, strict=True):
        pieces = [
            {kind: _rows(KINDS[kind], b, n) for kind in kinds}
            for b, n in zip(begin, size, strict=True)
        ]
        result = outputs_of_all_workers(OneDevice("CPU:0", Shared(sent)), LocalOutputs(pieces, 2))
    assert len(result) == (1 if "ragged" not in kinds else 4)
    for kind in kinds:
        rows = [row for piece in result for row in _plain(piece[kind])]
        assert str(rows) == str(_plain(KINDS[kind]))
        assert all(piece[kind].dtype == KINDS[kind].dtype for piece in result)


def test_splits_arrays_of_several_steps() -> None:
    sent: list[np.ndarray] = []
    for values, counts in (([0, 1, 3], ROWS[0]), ([2], ROWS[1])):
        (found,) = outputs_of_all_workers(
            OneDevice("CPU:0", Shared(sent)),
            LocalOutputs([(tf.constant(values),)], 2, np.array(counts)[:, None]),
        )
    keras.tree.map_structure(lambda t: np.testing.assert_array_equal(t, range(4)), found)


def test_pieces_of_different_widths_are_not_concatenated() -> None:
    pieces = [tf.ones([1, 2]), tf.ones([1, 3])]
    result = outputs_of_all_workers(OneDevice("CPU:0", Shared([])), LocalOutputs(pieces, 2))
    assert [piece.shape for piece in result] == [(1, 2), (1, 3)]
