"""Input pipelines for the photographs, as users write them: batches of random 224x224 crops.

All decode images, crop 8 to 100% of the area at random, resize to 224x224, flip at random, and
batch 64 images. Only Keras's reader resizes whole images without cropping, which is less work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import tensorflow as tf

import pipelines
from pipelines.maps import images
from tfdist.errors import DeviceError
from tfdist.tools.bench import harness, photographs
from tfdist.tools.bench.photographs import Photographs

LIMIT, OURS = "decoding alone, in memory", "pipelines"
PACKED = "pipelines, packed at 256 pixels"
SIZE = (224, 224)
BATCH_SIZE = 64
SHUFFLE_BUFFER = 1000
SEED = 1

#: Reads endlessly, and yields the number of images of each batch.
Reader = Callable[[Photographs], Iterator[int]]
GOAL = 0.02
_WAIT_BATCH_SIZE = 16
_FILTERS = (16, 32, 64, 64)  # several times slower on one core than decoding a batch
_STEPS = 40
_WARM_UP_STEPS = 5


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


def measure_wait(found: Photographs) -> dict[str, float]:
    """Trains a network that is slower than its input.

    Returns:
        `data_wait`, the fraction of time in which steps waited for data; `goal`; `steps`;
        `step_ms`; and `batch_ms`, the time per batch of the input without the model.

    Raises:
        DeviceError: There are fewer than two cores, or the system cannot bind threads to them.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise DeviceError("--with-model binds threads to cores, which only Linux can.")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise DeviceError("--with-model needs two cores, one for the model and one for the input.")
    with harness.on_cores(cores[:1]):
        tf.identity(0)  # starts TensorFlow's threads on the model's core
    with harness.on_cores(cores[1:2]):
        dataset = pipelines.read(
            found.shards,
            _WAIT_BATCH_SIZE,
            shuffle_buffer=SHUFFLE_BUFFER,
            seed=SEED,
            decode_images=False,
            last_batch="drop",
            augment_fn=lambda example, seed: (
                augment(example["image"], seed),
                example["label"],
            ),
            tuning=pipelines.Tuning(num_threads=1),
        )
        batches = iter(dataset.repeat())
        next(batches)
        begin = time.perf_counter()
        for _ in range(_STEPS):
            next(batches)
        batch_ms = (time.perf_counter() - begin) / _STEPS * 1e3
    with harness.on_cores(cores[:1]):
        waited = total = 0.0
        step = _training_step()
        for number in range(_WARM_UP_STEPS + _STEPS):
            begin = time.perf_counter()
            images, labels = next(batches)
            ready = time.perf_counter()
            float(step(images, labels))  # waits for the step, also on a GPU
            if number >= _WARM_UP_STEPS:
                waited += ready - begin
                total += time.perf_counter() - begin
    return {
        "data_wait": waited / total,
        "goal": GOAL,
        "steps": _STEPS,
        "step_ms": total / _STEPS * 1e3,
        "batch_ms": batch_ms,
    }


def _training_step() -> tf.types.experimental.PolymorphicFunction:
    model = keras.Sequential([keras.Input((*SIZE, 3))])
    for filters in _FILTERS:
        model.add(keras.layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu"))
        model.add(keras.layers.Conv2D(filters, 3, padding="same", activation="relu"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(photographs.NUM_CLASSES, activation="softmax"))
    optimizer = keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        # Normalize on the device, because transferring uint8 needs a quarter of the bytes.
        images = tf.cast(images, tf.float32) / 127.5 - 1
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables))
        return value

    return step
