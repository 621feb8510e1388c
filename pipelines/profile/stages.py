"""Measures the stages of reading, each as the time it adds to the pipeline before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import tensorflow as tf
from matplotlib.figure import Figure

from pipelines.format.examples import decode
from pipelines.format.index import load_index
from pipelines.maps import images
from pipelines.reading.folder import Folder
from pipelines.reading.tuning import DEFAULT, Tuning
from pipelines.storage import AnyPath

#: Advice by the slowest stage.
ADVICE = {
    "read": "move the shards to a faster disk, or read more at once (Tuning(num_reads=...))",
    "parse": "store fewer or larger features (encoding 'raw'), or parse whole batches: use "
    "batch_fn instead of map_fn",
    "decode": "decode only the region that is used (decode_images=False and "
    "pipelines.maps.images.random_crop), pack smaller images (--image-size), cache decoded images "
    "(cache='memory'), or add cores or a data service",
    "crop and scale": "pack images at the size that is used (--image-size), cache the results "
    "(cache='memory'), or add cores or a data service",
    "batch": "make examples smaller: uint8 instead of float32, normalized on the device",
}
#: Seconds. A shorter epoch spends most of its time on starting.
SHORTEST_EPOCH = 0.1
_SHUFFLE_BUFFER = 1000
_WARM_UP_FRACTION = 0.25


class Stage(NamedTuple):
    """One stage.

    Attributes:
        name: A key of `ADVICE`.
        microseconds: Time that the stage adds per record, with all cores working in parallel.
        records_per_s: Throughput of the pipeline that ends with this stage.
    """

    name: str
    microseconds: float
    records_per_s: float


def measure(
    directory: str | AnyPath,
    *,
    batch_size: int,
    size: images.Size,
    seconds: float,
    tuning: Tuning = DEFAULT,
) -> list[Stage]:
    """Measures the stages of reading a folder.

    Raises:
        DataError: The folder cannot be read.
    """
    folder = Folder(directory, shuffle_buffer=_SHUFFLE_BUFFER, seed=0, tuning=tuning)
    stages: list[Stage] = []
    before = 0.0
    datasets = _pipelines_by_stage(folder, size)
    for name, dataset in datasets.items():
        rate = _rate(dataset.shard(batch_size, batch_size - 1), batch_size, seconds)
        stages.append(Stage(name, max(0.0, 1e6 / rate - before), rate))
        before = max(before, 1e6 / rate)
    if not any(feature.is_ragged for feature in folder.features):
        last = datasets.get("crop and scale", datasets["parse"].map(lambda example, _: example))
        rate = _rate(last.batch(batch_size, drop_remainder=True), batch_size, seconds)
        stages.append(Stage("batch", max(0.0, 1e6 / rate - 1e6 / stages[-1].records_per_s), rate))
    return stages


def is_too_small(directory: str | AnyPath, stages: Sequence[Stage]) -> bool:
    """Returns whether an epoch through all stages is too short for a meaningful measurement."""
    slowest = min(stage.records_per_s for stage in stages)
    return load_index(directory).num_records / slowest < SHORTEST_EPOCH


def _pipelines_by_stage(folder: Folder, size: images.Size) -> dict[str, tf.data.Dataset]:
    """Returns endless pipelines by the name of the stage with which they end."""
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

    read = folder.repeated().unbatch()
    datasets = {"read": read, "parse": read.map(parse, tf.data.AUTOTUNE)}
    if pictures:
        # Cropping decodes only the region it needs, so it can be faster than this stage.
        datasets["decode"] = read.map(whole_images, tf.data.AUTOTUNE)
        datasets["crop and scale"] = read.map(crop, tf.data.AUTOTUNE)
    return datasets


def _rate(dataset: tf.data.Dataset, num_records: int, seconds: float) -> float:
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


def draw_chart(stages: Sequence[Stage], title: str, path: Path) -> Figure:
    """Draws a bar chart of the stages to a file."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(6, 1.0 + 0.45 * len(stages)), layout="constrained")
        axes = figure.subplots()
        names = [stage.name for stage in stages]
        bars = axes.barh(names, [stage.microseconds for stage in stages], color="tab:blue")
        axes.bar_label(bars, fmt="{:,.1f}", padding=3)
        axes.margins(x=0.25)  # for the number beside the longest bar
        axes.set_title(title)
        axes.invert_yaxis()
        axes.set_xlabel("microseconds per record")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
    return figure
