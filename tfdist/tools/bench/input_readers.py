"""Input pipelines for the photographs, as users write them: batches of random 224x224 crops.

All decode images, crop 8 to 100% of the area at random, resize to 224x224, flip at random, and
batch 64 images. Only Keras's reader resizes whole images without cropping, which is less work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf

import pipelines
from pipelines.maps import images
from tfdist.tools.bench import photographs
from tfdist.tools.bench.photographs import Photographs

LIMIT, OURS = "decoding alone, in memory", "pipelines"
PACKED = "pipelines, packed at 256 pixels"
SIZE = (224, 224)
BATCH_SIZE = 64
SHUFFLE_BUFFER = 1000
SEED = 1

#: Reads endlessly, and yields the number of images of each batch.
Reader = Callable[[Photographs], Iterator[int]]


def augment(encoded: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Decodes, crops and flips a JPEG with pipelines."""
    return images.flip(images.random_crop(encoded, seed, SIZE), seed)


def limit(images: Photographs) -> Iterator[int]:
    """Decodes bytes in memory, without reading, shuffling and batching."""
    dataset = tf.data.Dataset.from_tensor_slices(photographs.encoded(images)).enumerate()
    dataset = dataset.map(
        lambda i, encoded: augment(encoded, tf.stack([SEED, tf.cast(i, tf.int32)])),
        tf.data.AUTOTUNE,
    )
    # Return one of 64 images from the graph, so that the Python overhead is that of a batch.
    dataset = dataset.repeat().shard(BATCH_SIZE, BATCH_SIZE - 1).prefetch(tf.data.AUTOTUNE)
    return (BATCH_SIZE for _ in dataset)


def by_pipelines(shards: Path) -> Iterator[int]:
    """`pipelines.read`."""
    dataset = pipelines.read(
        shards,
        BATCH_SIZE,
        shuffle_buffer=SHUFFLE_BUFFER,
        seed=SEED,
        decode_images=False,
        augment_fn=lambda example, seed: (augment(example["image"], seed), example["label"]),
    )
    return batch_sizes(dataset.repeat())


def by_tf_data(images: Photographs) -> Iterator[int]:
    """A `tf.data` chain without parallel calls or prefetching."""

    def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        features = {
            "image": tf.io.FixedLenFeature((), tf.string),
            "label": tf.io.FixedLenFeature((), tf.int64),
        }
        example = tf.io.parse_single_example(record, features)
        return tf.io.decode_jpeg(example["image"], 3), example["label"]

    files = sorted(str(path) for path in images.shards.glob("*.tfrecord"))
    dataset = tf.data.TFRecordDataset(files).shuffle(SHUFFLE_BUFFER).map(parse).map(random_crop)
    return batch_sizes(dataset.batch(BATCH_SIZE).repeat())


def by_keras(images: Photographs) -> Iterator[int]:
    """`keras.utils.image_dataset_from_directory`."""
    import keras

    dataset = keras.utils.image_dataset_from_directory(
        str(images.files), image_size=SIZE, batch_size=BATCH_SIZE, seed=SEED, verbose=False
    )
    return batch_sizes(dataset.repeat())


READERS: dict[str, Reader] = {
    LIMIT: limit,
    OURS: lambda found: by_pipelines(found.shards),
    PACKED: lambda found: by_pipelines(found.packed),
    "tf.data, naive": by_tf_data,
    "image_dataset_from_directory": by_keras,
}


def random_crop(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Crops a decoded image at random with TensorFlow's functions."""
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


def batch_sizes(dataset: tf.data.Dataset) -> Iterator[int]:
    """Yields the number of examples of each batch."""
    return (len(labels) for _, labels in dataset)
