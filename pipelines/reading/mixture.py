"""Several folders as one stream, by weights: what a source gives is its own order, whoever is by.

The sources come in periods: in each, every source has its share of the draws, in an order drawn
anew. So the shares are exact, and how much of every source was taken before any batch is known
without drawing what came before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipelines.format import decode
from pipelines.reading import batching
from pipelines.reading.folder import Folder
from pipelines.reading.position import BEGINNING, Position, starts
from pipelines.reading.read import AugmentFn, MapFn
from pipelines.reading.tuning import DEFAULT, Tuning

#: Draws after which the shares are exact.
_PERIOD = 1000


class Source(NamedTuple):
    """One folder of a mixture.

    Attributes:
        directory: of the shards.
        weight: its share of the examples, relative to the others'.
        map_fn: what to make of its examples, so that they are like the others'.
    """

    directory: str | Path
    weight: float
    map_fn: MapFn | None = None


def mix(
    sources: Sequence[Source],
    batch_size: int,
    *,
    num_batches: int,
    seed: int,
    shuffle_buffer: int = 0,
    decode_images: bool = True,
    augment_fn: AugmentFn | None = None,
    batch_fn: Callable[[Any], Any] | None = None,
    context: tf.distribute.InputContext | None = None,
    start: Position | Callable[[], Position] = BEGINNING,
    tuning: Tuning = DEFAULT,
) -> tf.data.Dataset:
    """Reads several folders at once.

    Each source is read epoch after epoch, every record once in each, as `read` would with the
    same seed; epochs of the mixture go on where the last one ended.

    Args:
        sources: the folders.
        batch_size: the global batch.
        num_batches: of an epoch of the mixture; the sources have none in common.
        seed: of all orders.
        shuffle_buffer: as for `read`, in each source, as are the other arguments.
        decode_images: whether images become pixels.
        augment_fn: what to make of `map_fn`'s results at random.
        batch_fn: what to make of a batch.
        context: says which share is this pipeline's.
        start: where the first iteration begins.
        tuning: how much is done at once.

    Returns:
        `num_batches` full batches an iteration, in an order that follows from the seed.

    Raises:
        DataError: as `read` does.
        ValueError: no source, a weight that is not positive or too small beside the others, or
            a batch that cannot be divided among the pipelines.
    """
    draws = tf.constant(np.repeat(np.arange(len(sources)), _shares(sources)))
    batch_size = batching.share(batch_size, context)
    folders = [
        Folder(
            source.directory,
            context=context,
            shuffle_buffer=shuffle_buffer,
            seed=seed,
            tuning=tuning,
        )
        for source in sources
    ]

    def drawn(period: tf.Tensor) -> tf.Tensor:
        pair = tf.stack([tf.constant(seed, tf.int64), period])
        return tf.random.experimental.stateless_shuffle(draws, pair)

    def examples(source: Source, folder: Folder, taken: tf.Tensor) -> tf.data.Dataset:
        """A source's examples for ever, behind the first `taken`."""
        first = taken // folder.num_records

        def of_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
            left_out = tf.where(epoch == first, taken % folder.num_records, 0)
            position = tf.data.Dataset.from_tensors(tf.stack([epoch, left_out]))
            return folder.stream(position).map(folder.seeded)

        def made(record: tf.Tensor, seed: tf.Tensor) -> Any:
            example = decode.decode(record, folder.features, decode_images=decode_images)
            example = source.map_fn(example) if source.map_fn else example
            return augment_fn(example, seed) if augment_fn else example

        epochs = tf.data.Dataset.range(first, tf.int64.max)
        return epochs.flat_map(of_epoch).unbatch().map(made, tuning.num_maps)

    def of_iteration(position: tf.Tensor) -> tf.data.Dataset:
        first = position[0] * num_batches * batch_size + position[1]
        period, within = first // _PERIOD, first % _PERIOD
        counts = tf.math.bincount(tf.cast(draws, tf.int32), minlength=len(sources))
        counts_within = tf.math.bincount(
            tf.cast(drawn(period)[:within], tf.int32), minlength=len(sources)
        )
        taken = period * tf.cast(counts, tf.int64) + tf.cast(counts_within, tf.int64)
        choices = tf.data.Dataset.range(period, tf.int64.max).map(drawn).unbatch().skip(within)
        streams = [
            examples(source, folder, taken[i])
            for i, (source, folder) in enumerate(zip(sources, folders, strict=True))
        ]
        mixed = tf.data.Dataset.choose_from_datasets(streams, choices)
        return mixed.take(num_batches * batch_size - position[1])

    dataset = starts(start, batch_size).flat_map(of_iteration).batch(batch_size)
    if batch_fn:
        dataset = dataset.map(batch_fn, tuning.num_maps)
    if start == BEGINNING:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(num_batches))
    dataset = dataset.prefetch(tuning.num_prefetched)
    return dataset.with_options(tuning.options(deterministic=True))


def _shares(sources: Sequence[Source]) -> list[int]:
    """How many draws of a period each source has, at least one; the largest remainders first."""
    weights = np.array([source.weight for source in sources], np.float64)
    if not len(weights) or not np.all(weights > 0) or not np.all(np.isfinite(weights)):
        raise ValueError(f"sources: expected positive weights, got {weights.tolist()}")
    exact = weights / weights.sum() * _PERIOD
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: _PERIOD - shares.sum()]] += 1
    if not np.all(shares):
        raise ValueError(
            f"sources: expected weights of at least {1 / _PERIOD:.1%} of all, got "
            f"{weights.tolist()}; leave the smallest out, or put folders together"
        )
    return shares.tolist()
