"""Decodes and maps serialized records, and groups the examples into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf

from pipelines.format.examples import decode
from pipelines.format.feature import Feature
from pipelines.reading import order
from pipelines.reading.tuning import Tuning

#: Excludes a function from AutoGraph, which takes longer than the tracing. Functions of the user
#: need it.
_unconverted = tf.autograph.experimental.do_not_convert
#: Maps one example, a dictionary of arrays.
MapFn = Callable[[dict[str, tf.Tensor]], Any]
#: Augments the result of a map, with a seed, int32 `(2,)`, for stateless random operations.
AugmentFn = Callable[[Any, tf.Tensor], Any]


@dataclass(frozen=True, eq=False)
class ExampleMapper:
    """Turns serialized records into examples.

    Attributes:
        features: Features of the records.
        decode_images: Whether to decode images to pixels.
        map_fn: A deterministic function of the features.
        augment_fn: A random function of its result and a seed.
    """

    features: Sequence[Feature]
    decode_images: bool
    map_fn: MapFn | None
    augment_fn: AugmentFn | None

    @property
    def needs_single_examples(self) -> bool:
        """Whether a function needs single examples. Decoding alone works on whole batches."""
        return self.map_fn is not None or self.augment_fn is not None

    def map(self, serialized: tf.Tensor) -> Any:
        """Returns the example of a serialized record before augmentation, which can be cached."""
        example = decode(serialized, self.features, decode_images=self.decode_images)
        return self.map_fn(example) if self.map_fn else example

    def augment(self, mapped: Any, seed: tf.Tensor) -> Any:
        """Returns the augmented example, or the example itself without an `augment_fn`."""
        return self.augment_fn(mapped, seed) if self.augment_fn else mapped

    def map_and_augment(self, serialized: tf.Tensor, seed: tf.Tensor) -> Any:
        """Returns the augmented example of a serialized record."""
        return self.augment(self.map(serialized), seed)

    def map_and_augment_with_seed(
        self, serialized: tf.Tensor, seed: tf.Tensor
    ) -> tuple[Any, tf.Tensor]:
        """Returns the augmented example of a serialized record, and its seed."""
        return self.map_and_augment(serialized, seed), seed

    def augment_with_seed(self, mapped: Any, seed: tf.Tensor) -> tuple[Any, tf.Tensor]:
        """Returns the augmented example, and its seed."""
        return self.augment(mapped, seed), seed


#: Keep a partial last batch, drop it, or pad it and add a mask to every batch.
LastBatch = Literal["keep", "drop", "pad"]
#: Maps a batch.
BatchFn = Callable[..., Any]
#: Randomly changes a batch, with a seed, int32 `(2,)`, for stateless random operations.
MixFn = Callable[[Any, tf.Tensor], Any]


def pipeline_batch_size(batch_size: int, context: tf.distribute.InputContext | None) -> int:
    """Returns the number of rows of each global batch that one pipeline produces.

    Raises:
        ValueError: The batch cannot be divided among the pipelines.
    """
    num_pipelines = context.num_input_pipelines if context else 1
    if batch_size < 1 or batch_size % num_pipelines:
        raise ValueError(
            f"batch_size: expected a positive multiple of the {num_pipelines} input pipelines, "
            f"got {batch_size}"
        )
    return batch_size // num_pipelines


def num_batches(num_examples: int, batch_size: int, last_batch: LastBatch) -> int:
    """Returns the number of batches."""
    full, rest = divmod(num_examples, batch_size)
    return full + (rest > 0 and last_batch != "drop")


def batch_examples(
    records: tf.data.Dataset,
    mapper: ExampleMapper,
    batch_size: int,
    *,
    drop_remainder: bool,
    num_maps: int,
    keep_seeds: bool = False,
) -> tf.data.Dataset:
    """Returns the examples of records in batches.

    Args:
        records: Dataset of serialized records `(n,)` and their seeds, int32 `(n, 2)`.
        mapper: Turns records into examples.
        batch_size: Rows per batch.
        drop_remainder: Whether to drop a partial last batch.
        num_maps: Parallel calls of the mapper.
        keep_seeds: Whether to return pairs of a batch and the seeds of its examples, int32
            `(n, 2)`.
    """
    if mapper.needs_single_examples:
        make = mapper.map_and_augment_with_seed if keep_seeds else mapper.map_and_augment
        dataset = records.unbatch().map(make, num_maps)
        return dataset.batch(batch_size, drop_remainder)
    if keep_seeds:
        dataset = records.rebatch(batch_size, drop_remainder)
        return dataset.map(mapper.map_and_augment_with_seed, num_maps)
    # Parse whole batches, because calling a function costs more than parsing a small record.
    dataset = records.map(_unconverted(lambda serialized, _: serialized))
    return dataset.rebatch(batch_size, drop_remainder).map(_unconverted(mapper.map), num_maps)


def mix_batches(batch_fn: BatchFn | None, mix_fn: MixFn) -> BatchFn:
    """Returns a function of a batch and its examples' seeds that applies both functions."""

    def mix(batch: Any, seeds: tf.Tensor) -> Any:
        if batch_fn:
            batch = batch_fn(*batch) if isinstance(batch, tuple) else batch_fn(batch)
        return mix_fn(batch, order.batch_seed(seeds))

    return mix


def pad(batch: Any, batch_size: int) -> tuple[Any, tf.Tensor]:
    """Pads a batch by repeating its last row, because zeros may not be a valid example.

    Args:
        batch: Structure of tensors `(n, ...)`, n from 1 to `batch_size`.
        batch_size: Number of rows to pad to.

    Returns:
        The structure with `batch_size` rows, and a mask of the rows that are not padding, bool
        `(batch_size,)`. Use it as sample weights to exclude padding from the loss.
    """
    leaves = tf.nest.flatten(batch)
    first = leaves[0]
    num_rows = first.nrows() if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]
    rows = tf.range(batch_size)
    # All batches but the last are full, and padding them would copy them needlessly.
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


def finish(
    batches: tf.data.Dataset,
    *,
    batch_fn: BatchFn | None,
    num_batches: int | None,
    deterministic: bool,
    tuning: Tuning,
) -> tf.data.Dataset:
    """Applies the last stages to batches: mapping, prefetching and options.

    Args:
        batches: The batches of one pipeline.
        batch_fn: Maps each batch.
        num_batches: Batches per iteration, or None if iterations differ.
        deterministic: Whether the order must not depend on timing.
        tuning: Performance settings.
    """
    if batch_fn:
        batches = batches.map(batch_fn, tuning.num_maps)
    if num_batches is not None:
        batches = batches.apply(tf.data.experimental.assert_cardinality(num_batches))
    batches = batches.prefetch(tuning.num_prefetched)
    return batches.with_options(tuning.options(deterministic=deterministic))
