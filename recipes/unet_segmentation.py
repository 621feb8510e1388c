"""A U-Net that segments pets: classifies each pixel as pet, border, or background.

Ronneberger et al. 2015, "U-Net", on the Oxford-IIIT Pet data (Parkhi et al. 2012, "Cats and Dogs").

Command:   python -m tfdist.train --recipe unet_segmentation --strategy mirrored
Small:     ... --data small --set image_size=64 --set filters=8 --set depth=3 --batch-size 16
           --epochs 8: synthetic discs and squares with noise
Hardware:  one GPU; two CPU cores for the synthetic images
Result:    validation loss 0.31 and 88 % pixel accuracy on the synthetic images, in 64 s of CPU time
           on two cores; not trained on the pets here
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from pydantic import BaseModel, Field

import pipelines
from pipelines.maps import images
from tfdist import data, models, optimizers, schedules, train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "data": "tfds:oxford_iiit_pet",
    "epochs": 20,
    "batch_size": 64,
    "learning_rate": 2e-3,
    "lr_rule": "cosine",
    "warmup_epochs": 0.5,
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {"batch_size": 8, "set": {"image_size": 32, "filters": 4, "depth": 2}}

_NUM_CLASSES, _DRAWN_SIZE = 3, 64


class Hyperparameters(BaseModel):
    """Hyperparameters, which `--set NAME=VALUE` sets."""

    image_size: int = Field(128, ge=8)  # height and width in pixels, a multiple of 2 ** depth
    filters: int = Field(32, ge=1)
    depth: int = Field(4, ge=1)


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network for uint8 images."""
    hp = Hyperparameters.model_validate(config.set)
    shape = (hp.image_size, hp.image_size, 3)
    model = models.unet(
        shape, _NUM_CLASSES,
        filters=hp.filters, depth=hp.depth, batch_norm=True, scale=1 / 255,
    )  # fmt: skip
    overlap = keras.metrics.MeanIoU(_NUM_CLASSES, sparse_y_pred=False, name="mean_iou")
    model.compile(
        optimizer=optimizers.create(config, schedules.learning_rate(config, steps_per_epoch)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", overlap],
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
    )
    return model


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches `(uint8 (batch, size, size, 3), uint8 (batch, size, size))`."""
    return _read(config, "train", augment_fn=_flipped)


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns batches of the test images, without augmentation."""
    return _read(config, "validation")


def _read(config: TrainConfig, split: str, **maps: Any) -> tf.data.Dataset:
    size = Hyperparameters.model_validate(config.set).image_size

    def example(record: Any) -> Any:
        pixels = tf.image.resize(record["image"], (size, size))
        mask = tf.image.resize(record["segmentation_mask"], (size, size), "nearest")
        return tf.cast(pixels, tf.uint8), mask[..., 0] - 1  # classes are 1 to 3

    data_set = data.DataSet(
        name="pets",
        noise=(data.Noise((size, size, 3), "uint8", 256), data.Noise((size, size), "uint8", 3)),
        num_examples={"train": 3_680, "validation": 3_669},
        features={"image": None, "segmentation_mask": None},
        small=data.Small("1,024 drawn discs and squares", _FEATURES, _examples),
        splits={"train": "train", "validation": "test"},
    )
    return data.read(config, data_set, split, map_fn=example, shuffle_buffer=1024, **maps)


def _flipped(example: Any, seed: tf.Tensor) -> Any:
    pixels, mask = example
    both = images.flip(tf.concat([pixels, mask[..., None]], -1), seed)
    return both[..., :3], both[..., 3]


_FEATURES = tuple(
    pipelines.Feature(name=name, dtype="uint8", shape=(_DRAWN_SIZE, _DRAWN_SIZE, channels))
    for name, channels in [("image", 3), ("segmentation_mask", 1)]
)


def _examples(split: str) -> Iterator[dict[str, object]]:
    """Yields a disc (class 1) and a square (2) on a background (3), in random colors with noise."""
    random = np.random.default_rng(["train", "validation"].index(split))
    y, x = np.mgrid[:_DRAWN_SIZE, :_DRAWN_SIZE]
    for _ in range({"train": 1024, "validation": 256}[split]):
        mask = np.full((_DRAWN_SIZE, _DRAWN_SIZE), 3, "uint8")
        for kind in (1, 2):
            row, column = random.integers(8, _DRAWN_SIZE - 8, 2)
            away = np.linalg.norm([y - row, x - column], 2 if kind == 1 else np.inf, axis=0)
            mask[away < random.integers(6, 16)] = kind
        pixels = random.integers(0, 256, (3, 3))[mask - 1] + random.normal(0, 24, (*mask.shape, 3))
        yield {
            "image": np.clip(pixels, 0, 255).astype("uint8"),
            "segmentation_mask": mask[..., None],
        }


if __name__ == "__main__":
    sys.exit(train.main(["--recipe", __file__, *sys.argv[1:]]))
