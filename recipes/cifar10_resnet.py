"""A residual network on CIFAR-10, trained as in the ResNet paper.

He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2: 64,000 steps of 128
images, padded, cropped and flipped. Unlike the paper's, downsampling shortcuts are projections.

Command:   python -m tfdist.train --recipe cifar10_resnet --strategy mirrored
           --data FOLDER reads the official files, --data small uses synthetic images
Hardware:  one GPU; ResNet-20 has 0.27 million weights. ResNet-110: --set num_blocks=[18,18,18]
Result:    91.25 % test accuracy with ResNet-20 (the paper, table 6); not trained here
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from pipelines.maps import images
from tfdist import data, models, optimizers, schedules, train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "data": "tfds:cifar10",
    "model": "resnet18",
    "set": {"width": 16, "num_blocks": [3, 3, 3]},
    "epochs": 164,
    "batch_size": 128,
    "optimizer": "sgd",
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "learning_rate": 0.1,
    "lr_rule": "step",
    "lr_decay_epochs": [82, 123],  # the paper's 32,000 and 48,000 steps
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {"batch_size": 16, "set": {"width": 4, "num_blocks": [1, 1]}}

_SHAPE, _NUM_CLASSES, _PADDING = (32, 32, 3), 10, 4
_DATA = data.DataSet(
    name="cifar10",
    noise={"image": data.Noise(_SHAPE, "uint8", 256), "label": data.Noise((), "int32", 10)},
    num_examples={"train": 50_000, "validation": 10_000},
    features={"image": None, "label": _NUM_CLASSES},
    small=data.drawn_images(32, _NUM_CLASSES),
    splits={"train": "train", "validation": "test"},
)


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network for uint8 images."""
    model = models.image_classifier(
        config.model, _SHAPE, _NUM_CLASSES, config.set, scale=1 / 255
    )  # fmt: skip
    model.compile(
        optimizer=optimizers.create(config, schedules.learning_rate(config, steps_per_epoch)),
        loss=keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=config.label_smoothing
        ),
        metrics=["accuracy"],
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
    )
    return model


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches `(uint8 (batch, 32, 32, 3), float32 (batch, 10))`."""
    return data.read(config, _DATA, "train", augment_fn=_augmented, batch_fn=_image_and_label)


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches of the test images, without augmentation."""
    return data.read(config, _DATA, "validation", batch_fn=_image_and_label)


def _augmented(example: Any, seed: tf.Tensor) -> Any:
    """Pads by four pixels, crops at random to the original size, and flips at random."""
    sides = [[_PADDING] * 2, [_PADDING] * 2, [0, 0]]
    region = tf.image.stateless_random_crop(tf.pad(example["image"], sides), _SHAPE, seed)
    return example | {"image": images.flip(region, seed)}


def _image_and_label(batch: Any) -> tuple[tf.Tensor, tf.Tensor]:
    return batch["image"], tf.one_hot(batch["label"], _NUM_CLASSES)


if __name__ == "__main__":
    sys.exit(train.main(["--recipe", __file__, *sys.argv[1:]]))
