"""The outputs of all workers, on each of them: each sends those of its shares once a call.

They cross as they are, to the bit: numbers of every dtype, strings, ragged and sparse ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies.base import Strategy
from tfdist.strategies.collectives import array_bytes


class Own(NamedTuple):
    """What one worker has computed in some steps."""

    pieces: list[Any]  # structures of tensors, as many a step, in the order of the rows
    num_steps: int
    counts: np.ndarray | None = None  # where one piece holds all steps: of each its outputs' rows


#: Outputs as arrays, or ragged or sparse tensors, in the order in which a structure has them.
Leaves = list[Any]


def of_all(strategy: Strategy, own: Own) -> list[Any]:
    """Returns outputs that laid end to end are those of the global batches, in order.

    Args:
        strategy: By which the workers exchange them; all of them call this.
        own: Of this worker.
    """
    if own.counts is None:
        own = _joined(own)
    gathered = strategy.gather_bytes(array_bytes.packed(_arrays(own)))
    if any(part.size == 0 for part in gathered):
        return own.pieces  # nobody has any; or only some have, which the loop will say
    like = own.pieces[0]
    by_worker = [_by_step(array_bytes.unpacked(part), like) for part in gathered]
    if len(set(map(len, by_worker))) > 1:
        return own.pieces  # likewise
    in_order = [
        leaves for step in zip(*by_worker, strict=True) for group in step for leaves in group
    ]
    if _differ_by_rows(in_order):
        in_order = [[np.concatenate(column) for column in zip(*in_order, strict=True)]]
    return [_as_tensors(like, leaves) for leaves in in_order]


def _joined(own: Own) -> Own:
    """Lays pieces end to end where they are arrays that differ by their numbers of rows alone."""
    pieces = [[_as_array(leaf) for leaf in keras.tree.flatten(piece)] for piece in own.pieces]
    if not pieces or not _differ_by_rows(pieces):
        return own
    rows = np.array([[len(leaf) for leaf in leaves] for leaves in pieces])
    counts = rows.reshape(own.num_steps, -1, len(pieces[0])).sum(1)
    whole = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    return Own([keras.tree.pack_sequence_as(own.pieces[0], whole)], own.num_steps, counts)


def _arrays(own: Own) -> list[np.ndarray]:
    """What a worker sends: `Own.counts`, or else how many steps there are; and the pieces."""
    if not own.pieces:
        return []
    head = np.array(own.num_steps) if own.counts is None else own.counts
    leaves = keras.tree.flatten(own.pieces)
    return [head.astype(np.int64), *(array for leaf in leaves for array in _components(leaf))]


def _by_step(arrays: list[np.ndarray], like: Any) -> list[list[Leaves]]:
    """The pieces of each step of what a worker has sent."""
    head, *rest = arrays
    components = iter(rest)
    leaves = keras.tree.flatten(like)
    if head.ndim:
        ends = np.cumsum(head, 0)[:-1]
        parts = [np.split(next(components), ends[:, i]) for i in range(len(leaves))]
        return [[list(step)] for step in zip(*parts, strict=True)]
    pieces = list[Leaves]()
    while (first := next(components, None)) is not None:
        own = iter([first, *(next(components) for _ in range(sum(map(_size, leaves)) - 1))])
        pieces.append([_put_together(leaf, own) for leaf in leaves])
    a_step = len(pieces) // int(head)
    return [pieces[i : i + a_step] for i in range(0, len(pieces), a_step)]


def _differ_by_rows(pieces: list[Leaves]) -> bool:
    """Whether all are arrays of the same shapes but for the numbers of rows."""
    return all(
        all(isinstance(one, np.ndarray) and one.ndim for one in column)
        and len({one.shape[1:] for one in column}) == 1
        for column in zip(*pieces, strict=True)
    )


def _as_array(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf


def _as_tensors(like: Any, leaves: Leaves) -> Any:
    """A structure of tensors, of the dtypes of another."""
    tensors = [
        tf.convert_to_tensor(leaf, one.dtype) if isinstance(leaf, np.ndarray) else leaf
        for leaf, one in zip(leaves, keras.tree.flatten(like), strict=True)
    ]
    return keras.tree.pack_sequence_as(like, tensors)


def _components(leaf: Any) -> list[np.ndarray]:
    """The arrays that make an output."""
    parts = [leaf]
    if isinstance(leaf, tf.RaggedTensor):
        parts = [leaf.flat_values, *leaf.nested_row_splits]
    elif isinstance(leaf, tf.SparseTensor):
        parts = [leaf.indices, leaf.values, leaf.dense_shape]
    return [np.asarray(_as_array(part)) for part in parts]


def _size(like: Any) -> int:
    """How many arrays make an output."""
    if isinstance(like, tf.RaggedTensor):
        return 1 + like.ragged_rank
    return 3 if isinstance(like, tf.SparseTensor) else 1


def _put_together(like: Any, components: Iterator[np.ndarray]) -> Any:
    """An output of the kind of another, of as many arrays as make it."""
    arrays = [next(components) for _ in range(_size(like))]
    if isinstance(like, tf.RaggedTensor):
        values = tf.convert_to_tensor(arrays[0], like.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, arrays[1:], validate=False)
    if isinstance(like, tf.SparseTensor):
        indices, values, shape = arrays
        return tf.SparseTensor(indices, tf.convert_to_tensor(values, like.dtype), shape)
    return arrays[0]
