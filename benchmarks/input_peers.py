"""Readers of other libraries for `tfdist bench input`: tensorflow-datasets, PyTorch, grain."""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks import pillow_source
from tfdist.tools.bench.input_readers import (
    BATCH_SIZE,
    SEED,
    SHUFFLE_BUFFER,
    SIZE,
    Reader,
    batch_sizes,
    random_crop,
)
from tfdist.tools.bench.photographs import NUM_CLASSES, Photographs

_NUM_WORKERS = 2


def available() -> dict[str, Reader]:
    """Returns the readers whose packages are installed."""
    readers = {
        "tfds": ("tensorflow_datasets", by_tfds),
        "PyTorch DataLoader": ("torch", by_torch),
        "grain": ("grain", by_grain),
    }
    return {
        name: reader
        for name, (module, reader) in readers.items()
        if importlib.util.find_spec(module)
    }


def by_tfds(images: Photographs) -> Iterator[int]:
    """Reads with tensorflow-datasets."""
    import tensorflow_datasets as tfds

    # By default it keeps small data sets in memory, decoded: nothing would be read or decoded.
    reading = tfds.ReadConfig(try_autocache=False)
    dataset = _builder(images).as_dataset(
        split="train", shuffle_files=True, as_supervised=True, read_config=reading
    )
    dataset = dataset.shuffle(SHUFFLE_BUFFER).map(random_crop, tf.data.AUTOTUNE)
    return batch_sizes(dataset.batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE).repeat())


def by_torch(images: Photographs) -> Iterator[int]:
    """Reads with PyTorch's DataLoader and Pillow."""
    import torch

    source: Any = pillow_source.Source(images.files, SIZE)
    loader: Any = torch.utils.data.DataLoader(
        source,
        BATCH_SIZE,
        shuffle=True,
        num_workers=_NUM_WORKERS,
        persistent_workers=True,
        multiprocessing_context="spawn",  # a fork would copy TensorFlow's locks
    )
    return (len(labels) for _ in itertools.count() for _, labels in loader)


def by_grain(images: Photographs) -> Iterator[int]:
    """Reads with grain and Pillow."""
    import grain

    source = pillow_source.Source(images.files, SIZE)
    dataset = grain.MapDataset.source(source).shuffle(seed=SEED).repeat()
    batches: Any = dataset.to_iter_dataset().batch(BATCH_SIZE)
    batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=_NUM_WORKERS))
    return (len(labels) for _, labels in batches)


@functools.cache  # a class can be registered only once
def _builder(images: Photographs) -> Any:
    """Returns a builder of tensorflow-datasets, with its files written."""
    import tensorflow_datasets as tfds

    class _Photographs(tfds.core.GeneratorBasedBuilder):
        """An image folder with labels."""

        VERSION = tfds.core.Version("1.0.0")
        name = "photographs"

        def _info(self) -> Any:
            features = {
                "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(num_classes=NUM_CLASSES),
            }
            return self.dataset_info_from_configs(
                features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Iterator[tuple[str, dict[str, Any]]]:
            for path in sorted(Path(images.files).glob("*/*.jpg")):
                yield path.name, {"image": str(path), "label": int(path.parent.name)}

    builder = _Photographs(data_dir=str(images.shards.parent / "tfds"))
    tfds.disable_progress_bar()
    builder.download_and_prepare()
    return builder
