"""Ways to read the photographs, each as its users write it: batches of 224x224, cropped at random.

The same work in every one: decode, a crop of 8 to 100 % of the area at random, scaled to 224x224,
mirrored at random, batches of 64; but Keras's own reader scales whole images, which is less.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tensorflow as tf

import pipelines
from pipelines.maps import images
from tfdist.bench.input import photographs
from tfdist.bench.input.photographs import Photographs

LIMIT, OURS = "decoding alone, in memory", "pipelines"
PACKED = "pipelines, packed at 256 pixels"
SIZE = (224, 224)
BATCH_SIZE = 64
SHUFFLE_BUFFER = 1000
SEED = 1
NUM_WORKERS = 2

#: Starts reading for ever; yields how many images came with each step.
Contender = Callable[[Photographs], Iterator[int]]


def available() -> dict[str, Contender]:
    """The contenders whose packages are installed; the limit and ours first."""
    optional = {
        "tfds": ("tensorflow_datasets", _tfds),
        "PyTorch DataLoader": ("torch", _torch),
        "grain": ("grain", _grain),
    }
    found: dict[str, Contender] = {
        LIMIT: _limit,
        OURS: lambda made: _ours(made.shards),
        PACKED: lambda made: _ours(made.packed),
        "tf.data, naive": _naive,
        "image_dataset_from_directory": _keras,
    }
    for name, (module, contender) in optional.items():
        if importlib.util.find_spec(module):
            found[name] = contender
    return found


def augmented(encoded: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """What ours makes of a file's bytes."""
    return images.flip(images.random_crop(encoded, seed, SIZE), seed)


def _limit(made: Photographs) -> Iterator[int]:
    """Our own maps on bytes in memory: no reading, no shuffling, no batches."""
    dataset = tf.data.Dataset.from_tensor_slices(photographs.encoded(made)).enumerate()
    dataset = dataset.map(
        lambda i, encoded: augmented(encoded, tf.stack([SEED, tf.cast(i, tf.int32)])),
        tf.data.AUTOTUNE,
    )
    # Of 64 one leaves the graph, so that Python does what it does in the others; none is copied.
    dataset = dataset.repeat().shard(BATCH_SIZE, BATCH_SIZE - 1).prefetch(tf.data.AUTOTUNE)
    return (BATCH_SIZE for _ in dataset)


def _ours(shards: Path) -> Iterator[int]:
    dataset = pipelines.read(
        shards,
        BATCH_SIZE,
        shuffle_buffer=SHUFFLE_BUFFER,
        seed=SEED,
        decode_images=False,
        augment_fn=lambda example, seed: (augmented(example["image"], seed), example["label"]),
    )
    return _sizes(dataset.repeat())


def _naive(made: Photographs) -> Iterator[int]:
    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        features = {
            "image": tf.io.FixedLenFeature((), tf.string),
            "label": tf.io.FixedLenFeature((), tf.int64),
        }
        example = tf.io.parse_single_example(record, features)
        return tf.io.decode_jpeg(example["image"], 3), example["label"]

    files = sorted(str(path) for path in made.shards.glob("*.tfrecord"))
    dataset = tf.data.TFRecordDataset(files).shuffle(SHUFFLE_BUFFER).map(parse).map(_in_tensorflow)
    return _sizes(dataset.batch(BATCH_SIZE).repeat())


def _keras(made: Photographs) -> Iterator[int]:
    import keras

    dataset = keras.utils.image_dataset_from_directory(
        str(made.files), image_size=SIZE, batch_size=BATCH_SIZE, seed=SEED, verbose=False
    )
    return _sizes(dataset.repeat())


def _tfds(made: Photographs) -> Iterator[int]:
    from tfdist.bench.input import as_tfds

    # Small sets it would keep in memory, decoded: nothing would be read or decoded here.
    reading = as_tfds.tfds.ReadConfig(try_autocache=False)
    dataset = as_tfds.builder(made).as_dataset(
        split="train", shuffle_files=True, as_supervised=True, read_config=reading
    )
    dataset = dataset.shuffle(SHUFFLE_BUFFER).map(_in_tensorflow, tf.data.AUTOTUNE)
    return _sizes(dataset.batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE).repeat())


def _torch(made: Photographs) -> Iterator[int]:
    import torch

    from tfdist.bench.input import pillow

    source: Any = pillow.Source(made.files, SIZE)
    loader: Any = torch.utils.data.DataLoader(
        source,
        BATCH_SIZE,
        shuffle=True,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        multiprocessing_context="spawn",  # a fork would copy TensorFlow's locks
    )
    return (len(labels) for _ in itertools.count() for _, labels in loader)


def _grain(made: Photographs) -> Iterator[int]:
    import grain

    from tfdist.bench.input import pillow

    dataset = grain.MapDataset.source(pillow.Source(made.files, SIZE)).shuffle(seed=SEED).repeat()
    batches: Any = dataset.to_iter_dataset().batch(BATCH_SIZE)
    batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=NUM_WORKERS))
    return (len(labels) for _, labels in batches)


def _in_tensorflow(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A random crop of a decoded image, with TensorFlow's own functions."""
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros((1, 0, 4)),
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        min_object_covered=0.0,
        use_image_if_no_bounding_boxes=True,
    )
    crop = tf.image.resize(tf.slice(image, begin, size), SIZE)
    return tf.cast(tf.image.random_flip_left_right(crop), tf.uint8), label


def _sizes(dataset: tf.data.Dataset) -> Iterator[int]:
    return (len(labels) for _, labels in dataset)
