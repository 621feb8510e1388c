"""Times the stages of reading: each as what it adds to a pipeline that ends before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from pipelines.format.decode import decode
from pipelines.format.index import load_index
from pipelines.maps import images
from pipelines.reading.folder import Folder
from pipelines.reading.tuning import DEFAULT

#: What to change where a stage takes most.
ADVICE = {
    "read": "bring the shards nearer (a local disk), or read more at once (Tuning(num_reads=...))",
    "parse": "store fewer or larger features (encoding 'raw'), or parse whole batches: leave "
    "map_fn out and use batch_fn",
    "decode": "decode only the region that is used (decode_images=False and "
    "pipelines.maps.images.random_crop), pack smaller images (--image-size), keep them decoded "
    "(cache='memory'), or add cores or a data service",
    "crop and scale": "pack images at the size that is used (--image-size), keep what was made "
    "(cache='memory'), or add cores or a data service",
    "batch": "make less of each example: uint8 instead of float32, normalised on the device",
}
#: Seconds; in a shorter one, beginning an epoch takes the time and not what is timed.
SHORTEST_EPOCH = 0.1
_SHUFFLE_BUFFER = 1000
_WARM_UP_FRACTION = 0.25


class Stage(NamedTuple):
    """One stage.

    Attributes:
        name: a key of `ADVICE`.
        microseconds: that it adds to each record, over all cores at once.
        records_per_s: of the pipeline that ends with it.
    """

    name: str
    microseconds: float
    records_per_s: float


def measure(
    directory: str | Path, *, batch_size: int, size: images.Size, seconds: float
) -> list[Stage]:
    """Times a folder's stages.

    Args:
        directory: the folder.
        batch_size: of the batches.
        size: height and width that images are cropped and scaled to.
        seconds: to spend on each stage.

    Raises:
        DataError: the folder cannot be read.
    """
    folder = Folder(directory, shuffle_buffer=_SHUFFLE_BUFFER, seed=0)
    stages: list[Stage] = []
    before = 0.0
    datasets = _up_to_each(folder, size)
    for name, dataset in datasets.items():
        rate = _rate(dataset.shard(batch_size, batch_size - 1), batch_size, seconds)
        stages.append(Stage(name, max(0.0, 1e6 / rate - before), rate))
        before = max(before, 1e6 / rate)
    if not any(feature.is_ragged for feature in folder.features):
        last = datasets.get("crop and scale", datasets["parse"].map(lambda example, _: example))
        rate = _rate(last.batch(batch_size, drop_remainder=True), batch_size, seconds)
        stages.append(Stage("batch", max(0.0, 1e6 / rate - 1e6 / stages[-1].records_per_s), rate))
    return stages


def is_too_small(directory: str | Path, stages: Sequence[Stage]) -> bool:
    """Whether an epoch through all stages is too short for their times to mean anything."""
    slowest = min(stage.records_per_s for stage in stages)
    return load_index(directory).num_records / slowest < SHORTEST_EPOCH


def _up_to_each(folder: Folder, size: images.Size) -> dict[str, tf.data.Dataset]:
    """Endless pipelines, each of which ends with the stage that it is named for."""
    pictures = [feature.name for feature in folder.features if feature.is_image]

    def parse(record: tf.Tensor, seed: tf.Tensor) -> tuple[dict[str, Any], tf.Tensor]:
        return decode(record, folder.features, decode_images=False), seed

    def whole_images(record: tf.Tensor, _: tf.Tensor) -> dict[str, Any]:
        return decode(record, folder.features)

    def crop(record: tf.Tensor, seed: tf.Tensor) -> dict[str, Any]:
        example, seed = parse(record, seed)
        for name in pictures:
            example[name] = images.flip(images.random_crop(example[name], seed, size), seed)
        return example

    read = folder.for_ever().unbatch()
    datasets = {"read": read, "parse": read.map(parse, tf.data.AUTOTUNE)}
    if pictures:
        # Cropping decodes too, the region it needs: what it adds to whole images may be nothing.
        datasets["decode"] = read.map(whole_images, tf.data.AUTOTUNE)
        datasets["crop and scale"] = read.map(crop, tf.data.AUTOTUNE)
    return datasets


def _rate(dataset: tf.data.Dataset, num_records: int, seconds: float) -> float:
    """Records per second, where each element stands for `num_records`."""
    dataset = dataset.prefetch(tf.data.AUTOTUNE).with_options(DEFAULT.options(deterministic=True))
    iterator = iter(dataset)
    next(iterator)
    begin = time.perf_counter()
    while time.perf_counter() - begin < _WARM_UP_FRACTION * seconds:
        next(iterator)
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds or not count:
        next(iterator)
        count += num_records
    return count / (time.perf_counter() - begin)
