"""Batches, and what becomes of the last one of an epoch."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

#: Kept as it is; dropped unless it is full; or filled up, with a mask beside every batch.
LastBatch = Literal["keep", "drop", "pad"]


def share(batch_size: int, context: tf.distribute.InputContext | None) -> int:
    """One pipeline's part of a global batch.

    Raises:
        ValueError: the batch cannot be divided among the pipelines.
    """
    num_pipelines = context.num_input_pipelines if context else 1
    if batch_size < 1 or batch_size % num_pipelines:
        raise ValueError(
            f"batch_size: expected a positive multiple of the {num_pipelines} input pipelines, "
            f"got {batch_size}"
        )
    return batch_size // num_pipelines


def num_batches(num_examples: int, batch_size: int, last_batch: LastBatch) -> int:
    """How many batches the examples make."""
    full, rest = divmod(num_examples, batch_size)
    return full + (rest > 0 and last_batch != "drop")


def pad(batch: Any, batch_size: int) -> tuple[Any, tf.Tensor]:
    """Fills a batch up, with its last row: zeros might be no valid example.

    Args:
        batch: structure of tensors `(n, ...)`, n from 1 to `batch_size`.
        batch_size: rows to fill up to.

    Returns:
        The structure with `batch_size` rows, and which rows are the batch's own, bool
        `(batch_size,)`: as sample weights it takes the others out of a loss.
    """
    leaves = tf.nest.flatten(batch)
    first = leaves[0]
    num_rows = first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]
    rows = tf.range(batch_size)
    # Batches are full but for the last: gathering every one would copy it for nothing.
    filled = [
        tf.cond(
            tf.cast(num_rows, tf.int32) == batch_size,
            lambda leaf=leaf: leaf,
            lambda leaf=leaf: tf.gather(leaf, tf.minimum(rows, tf.cast(num_rows, tf.int32) - 1)),
        )
        for leaf in leaves
    ]
    for leaf in filled:
        if isinstance(leaf, tf.Tensor):
            leaf.set_shape([batch_size, *leaf.shape[1:]])
    return tf.nest.pack_sequence_as(batch, filled), rows < tf.cast(num_rows, tf.int32)
