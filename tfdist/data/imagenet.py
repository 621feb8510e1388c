"""ImageNet with the usual preprocessing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipelines.maps import images
from tfdist.config import TrainConfig
from tfdist.data.data_set import DataSet
from tfdist.data.reading import read
from tfdist.data.synthetic import Noise, drawn_images

NUM_CLASSES = 1000


def imagenet(
    config: TrainConfig,
    split: str,
    size: int,
    *,
    change_fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None = None,
    mix_fn: Callable[..., Any] | None = None,
) -> tf.data.Dataset:
    """Reads random crops with random flips for training, or center crops for validation.

    The random crops are those of Szegedy et al. 2014, "Going deeper with convolutions".

    Args:
        config: Configuration of the data, batch size and seed.
        split: `"train"` for random crops, `"validation"` for center crops in a fixed order.
        size: Pixels per side.
        change_fn: Further augmentation of a crop, with a seed.
        mix_fn: `mix_fn` of `pipelines.read` for training.

    Returns:
        Global batches `(uint8 (batch, size, size, 3), float32 (batch, 1000))`.
    """

    def region(example: Any, seed: tf.Tensor) -> Any:
        pixels = images.random_crop(example["image"], seed, (size, size))
        pixels = images.flip(pixels, seed)
        return change_fn(pixels, seed) if change_fn else pixels, example["label"]

    def middle(example: Any) -> Any:
        return images.center_crop(example["image"], (size, size)), example["label"]

    data_set = DataSet(
        name="imagenet",
        noise=(Noise((size, size, 3), "uint8", 256), Noise((), "int64", NUM_CLASSES)),
        num_examples={"train": 1_281_167, "validation": 50_000},
        features={"image": None, "label": NUM_CLASSES},
        small=drawn_images(64, 10),
    )
    trains = split == "train"
    return read(
        config,
        data_set,
        split,
        decode_images=False,
        map_fn=None if trains else middle,
        augment_fn=region,
        batch_fn=lambda pixels, labels: (pixels, tf.one_hot(labels, NUM_CLASSES)),
        mix_fn=mix_fn if trains else None,
    )
