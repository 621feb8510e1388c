"""Several folders as one stream, by weights; what comes of each is in the order of it alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from pipelines.reading import batching
from pipelines.reading.batching import BatchFn
from pipelines.reading.draws import Draws
from pipelines.reading.examples import AugmentFn, ExampleMaker, MapFn
from pipelines.reading.folder import Folder
from pipelines.reading.position import BEGINNING, Position, starts
from pipelines.reading.restart import with_restart
from pipelines.reading.tuning import DEFAULT, Tuning


class Source(NamedTuple):
    """One folder of a mixture.

    Attributes:
        directory: of the shards.
        weight: how many of the examples are its own, relative to the others'.
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
    batch_fn: BatchFn | None = None,
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
        context: says which of the pipelines that divide the data and each batch this is.
        start: where the first iteration begins.
        tuning: how much is done at once.

    Returns:
        `num_batches` full batches an iteration, in an order that follows from the seed.

    Raises:
        DataError: as `read` does.
        ValueError: no source, a weight that is not positive or too small beside the others, or
            a batch that cannot be divided among the pipelines.
    """
    draws = Draws([source.weight for source in sources], seed)
    whole_batch, batch_size = batch_size, batching.per_pipeline(batch_size, context)
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
    makers = [
        ExampleMaker(folder.features, decode_images, source.map_fn, augment_fn)
        for source, folder in zip(sources, folders, strict=True)
    ]

    def of_iteration(start: tf.Tensor) -> tf.data.Dataset:
        epoch, left_out = start[0], start[1]
        place = epoch * num_batches * batch_size + left_out
        taken = draws.taken_before(place)
        streams = [
            folder.for_ever(taken[i]).unbatch().map(maker.made, tuning.num_maps)
            for i, (folder, maker) in enumerate(zip(folders, makers, strict=True))
        ]
        mixed = tf.data.Dataset.choose_from_datasets(streams, draws.behind(place))
        return mixed.take(num_batches * batch_size - left_out)

    dataset = batching.finished(
        starts(start, batch_size).flat_map(of_iteration).batch(batch_size),
        batch_fn=batch_fn,
        num_batches=num_batches if start == BEGINNING else None,
        deterministic=True,
        tuning=tuning,
    )

    def again(start: Callable[[], Position]) -> tf.data.Dataset:
        return mix(
            sources, whole_batch, num_batches=num_batches, seed=seed,
            shuffle_buffer=shuffle_buffer, decode_images=decode_images, augment_fn=augment_fn,
            batch_fn=batch_fn, context=context, start=start, tuning=tuning,
        )  # fmt: skip

    return with_restart(dataset, again, start)
