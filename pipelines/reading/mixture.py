"""`mix`: reads several folders as one stream, in the proportions of their weights.

The source of each example is drawn in periods of 1,000 examples. Within a period, each source is
drawn exactly in proportion to its weight, in a new random order. So the proportions are exact, and
the number of examples of each source before any position is known without drawing again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from pipelines.reading import batching
from pipelines.reading.batching import AugmentFn, BatchFn, ExampleMapper, MapFn
from pipelines.reading.folder import Folder
from pipelines.reading.position import BEGINNING, Position, starts, with_restart
from pipelines.reading.tuning import DEFAULT, Tuning
from pipelines.storage import AnyPath


class Source(NamedTuple):
    """One folder of a mixture.

    Example:
        >>> pipelines.Source("data/digits", 0.75).weight
        0.75

    Attributes:
        directory: The folder of the shards.
        weight: Proportion of its examples, relative to the other weights.
        map_fn: Maps its examples to the structure that all sources share.
    """

    directory: str | AnyPath
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
    batch_fn: BatchFn | None = None,
    context: tf.distribute.InputContext | None = None,
    start: Position | Callable[[], Position] = BEGINNING,
    tuning: Tuning = DEFAULT,
) -> tf.data.Dataset:
    """Reads several folders as one stream.

    Each source is read epoch after epoch, as by `read` with the same seed. An epoch of the mixture
    continues where the previous one ended.

    Example:
        >>> sources = [pipelines.Source("data/digits", 0.75), pipelines.Source("data/digits", 0.25)]
        >>> dataset = pipelines.mix(sources, 64, num_batches=10, seed=1)
        >>> len(list(dataset))
        10

    Args:
        sources: The folders.
        batch_size: Global batch size.
        num_batches: Batches per epoch of the mixture.
        seed: Seed of all orders.
        shuffle_buffer: As in `read`, for each source.
        decode_images: As in `read`.
        augment_fn: As in `read`, applied to the results of `map_fn`.
        batch_fn: As in `read`.
        context: As in `read`.
        start: As in `read`.
        tuning: As in `read`.

    Returns:
        `num_batches` full batches per iteration, in an order that depends on the seed only.

    Raises:
        DataError: A folder cannot be read, see `read`.
        ValueError: There is no source, a weight is not positive or too small, or the batch cannot
            be divided among the pipelines.
    """
    draws = Draws([source.weight for source in sources], seed)
    global_batch_size, batch_size = batch_size, batching.pipeline_batch_size(batch_size, context)
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
    mappers = [
        ExampleMapper(folder.features, decode_images, source.map_fn, augment_fn)
        for source, folder in zip(sources, folders, strict=True)
    ]

    def of_iteration(start: tf.Tensor) -> tf.data.Dataset:
        epoch, num_skipped = start[0], start[1]
        position = epoch * num_batches * batch_size + num_skipped
        num_taken = draws.counts_before(position)
        streams = [
            folder.repeated(num_taken[i]).unbatch().map(mapper.map_and_augment, tuning.num_maps)
            for i, (folder, mapper) in enumerate(zip(folders, mappers, strict=True))
        ]
        mixed = tf.data.Dataset.choose_from_datasets(streams, draws.sources_from(position))
        return mixed.take(num_batches * batch_size - num_skipped)

    dataset = batching.finish(
        starts(start, batch_size).flat_map(of_iteration).batch(batch_size),
        batch_fn=batch_fn,
        num_batches=num_batches if start == BEGINNING else None,
        deterministic=True,
        tuning=tuning,
    )

    def again(start: Callable[[], Position]) -> tf.data.Dataset:
        return mix(
            sources, global_batch_size, num_batches=num_batches, seed=seed,
            shuffle_buffer=shuffle_buffer, decode_images=decode_images, augment_fn=augment_fn,
            batch_fn=batch_fn, context=context, start=start, tuning=tuning,
        )  # fmt: skip

    return with_restart(dataset, again, start)


#: Number of draws after which the proportions are exact.
_PERIOD = 1000


class Draws:
    """Draws the source of each example of a mixture.

    Args:
        weights: Weights of the sources, relative to each other.
        seed: Seed of the order in every period.

    Raises:
        ValueError: There is no weight, or one is not positive or too small.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._num_sources, self._seed = len(weights), seed
        self._sources = tf.constant(np.repeat(np.arange(len(weights)), _draws_per_period(weights)))

    def counts_before(self, position: tf.Tensor) -> tf.Tensor:
        """Returns the number of examples of each source before a position, `(num_sources,)`."""
        period, within = position // _PERIOD, position % _PERIOD
        return period * self._counts(self._sources) + self._counts(self._of(period)[:within])

    def sources_from(self, position: tf.Tensor) -> tf.data.Dataset:
        """Returns an endless dataset of source numbers from a position on."""
        period, within = position // _PERIOD, position % _PERIOD
        periods = tf.data.Dataset.range(period, tf.int64.max)
        return periods.map(self._of).unbatch().skip(within)

    def _of(self, period: tf.Tensor) -> tf.Tensor:
        pair = tf.stack([tf.constant(self._seed, tf.int64), period])
        return tf.random.experimental.stateless_shuffle(self._sources, pair)

    def _counts(self, sources: tf.Tensor) -> tf.Tensor:
        counts = tf.math.bincount(tf.cast(sources, tf.int32), minlength=self._num_sources)
        return tf.cast(counts, tf.int64)


def _draws_per_period(weights: Sequence[float]) -> list[int]:
    """Returns the draws per period of each source, at least one, by the largest remainders."""
    given = np.array(weights, np.float64)
    if not len(given) or not np.all(given > 0) or not np.all(np.isfinite(given)):
        raise ValueError(f"sources: expected positive weights, got {given.tolist()}")
    exact = given / given.sum() * _PERIOD
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: _PERIOD - counts.sum()]] += 1
    if not np.all(counts):
        raise ValueError(
            f"sources: expected weights of at least {1 / _PERIOD:.1%} of their sum, got "
            f"{given.tolist()}; drop the smallest source, or merge folders"
        )
    return counts.tolist()
