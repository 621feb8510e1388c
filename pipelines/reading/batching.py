"""Batches: how large, made of which examples, what becomes of the last one and of whole ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from pipelines.reading import seeds
from pipelines.reading.blocks import Records
from pipelines.reading.examples import ExampleMaker
from pipelines.reading.tuning import Tuning

#: Kept as it is; dropped unless it is full; or filled up, with a mask beside every batch.
LastBatch = Literal["keep", "drop", "pad"]
#: What to make of a batch.
BatchFn = Callable[..., Any]
#: What to make of that at random, with a seed, int32 `(2,)`, for stateless operations.
MixFn = Callable[[Any, tf.Tensor], Any]


def per_pipeline(batch_size: int, context: tf.distribute.InputContext | None) -> int:
    """How many rows of each global batch one pipeline makes.

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


def batches_of(
    records: tf.data.Dataset,
    with_seeds: Callable[[Records], tuple[tf.Tensor, tf.Tensor]],
    maker: ExampleMaker,
    batch_size: int,
    *,
    drop_remainder: bool,
    num_maps: int,
    keep_seeds: bool = False,
) -> tf.data.Dataset:
    """Examples of records, in batches.

    Args:
        records: of `Records` of any lengths.
        with_seeds: the serialized records of such an element, and a seed for each.
        maker: makes the examples.
        batch_size: rows of a batch.
        drop_remainder: leave out a last batch that is not full.
        num_maps: calls of the maker at once.
        keep_seeds: make pairs: a batch, and the seeds of its examples, int32 `(n, 2)`.
    """
    if maker.needs_single_examples:
        make = maker.made_with_seed if keep_seeds else maker.made
        dataset = records.map(with_seeds).unbatch().map(make, num_maps)
        return dataset.batch(batch_size, drop_remainder)
    if keep_seeds:
        dataset = records.map(with_seeds).rebatch(batch_size, drop_remainder)
        return dataset.map(maker.made_with_seed, num_maps)
    # Whole batches: calling a function costs more than parsing a small record.
    dataset = records.map(lambda read: read.serialized).rebatch(batch_size, drop_remainder)
    return dataset.map(maker.mapped, num_maps)


def mixing(batch_fn: BatchFn | None, mix_fn: MixFn) -> BatchFn:
    """What makes of a batch and its examples' seeds what both functions make of it, in turn."""

    def mix(batch: Any, of_examples: tf.Tensor) -> Any:
        if batch_fn:
            batch = batch_fn(*batch) if isinstance(batch, tuple) else batch_fn(batch)
        return mix_fn(batch, seeds.of_batch(of_examples))

    return mix


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
    # Batches are full but for the last: to fill up every one would copy it for nothing.
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


def finished(
    batches: tf.data.Dataset,
    *,
    batch_fn: BatchFn | None,
    num_batches: int | None,
    deterministic: bool,
    tuning: Tuning,
) -> tf.data.Dataset:
    """The last stages, of whole batches.

    Args:
        batches: of one pipeline.
        batch_fn: what to make of each.
        num_batches: of an iteration, or None where iterations differ.
        deterministic: whether the order may not depend on timing.
        tuning: how much is done at once.
    """
    if batch_fn:
        batches = batches.map(batch_fn, tuning.num_maps)
    if num_batches is not None:
        batches = batches.apply(tf.data.experimental.assert_cardinality(num_batches))
    batches = batches.prefetch(tuning.num_prefetched)
    return batches.with_options(tuning.options(deterministic=deterministic))
