"""Keeping what a map made of the examples, so that later epochs need not make it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from pipelines.reading import seeds
from pipelines.reading.folder import Folder

IN_MEMORY = "memory"

_OF_GRAPH = 1


def cached(
    starts: tf.data.Dataset,
    folder: Folder,
    make: Callable[[tf.Tensor], Any],
    place: str | Path,
    shuffle_buffer: int,
    num_maps: int,
) -> tf.data.Dataset:
    """What `make` makes of each record, made once and then kept, with its seed.

    What is kept comes again as it came first, in the order of the files, so it is shuffled after.

    Args:
        starts: one element: the epoch, and records of it to leave out, int64 `(2,)`.
        folder: reads in the order of its files.
        make: from a serialized record.
        place: `"memory"`, or a folder, which is made.
        shuffle_buffer: examples to shuffle among; 0: none.
        num_maps: calls of `make` at once.

    Returns:
        A dataset of pairs: what was made, and the seed, int32 `(2,)`.
    """
    kept = folder.stream(tf.data.Dataset.from_tensors(tf.constant([0, 0], tf.int64))).unbatch()
    kept = kept.map(lambda record: (make(record.serialized), record.numbers), num_maps)
    if place == IN_MEMORY:
        kept = kept.cache()
    else:
        Path(place).mkdir(parents=True, exist_ok=True)
        kept = kept.cache(str(Path(place) / folder.fingerprint))

    def of_epoch(start: tf.Tensor) -> tf.data.Dataset:
        seed, dataset = seeds.of_epoch(folder.seed, start[0]), kept
        if shuffle_buffer:
            buffer = min(shuffle_buffer, folder.num_records)
            # Of this graph: the program's own seed, which tf.data mixes in, is not the order's, and
            # 0 would be compared with a tensor.
            tf.compat.v1.set_random_seed(_OF_GRAPH)
            dataset = kept.shuffle(buffer, tf.cast(seed[0], tf.int64), False)
        dataset = dataset.skip(start[1])
        return dataset.map(lambda made, number: (made, seeds.of_examples(seed, number)))

    return starts.flat_map(of_epoch)
