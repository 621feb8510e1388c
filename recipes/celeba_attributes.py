"""Multi-label classification: forty binary attributes of faces by a convolutional network.

Data: CelebA, from Liu et al. 2015, "Deep Learning Face Attributes in the Wild".

Command:   python -m tfdist.train --recipe celeba_attributes --strategy mirrored --data celeba/
           with the official files in celeba/; --data small uses synthetic images
Hardware:  one GPU, or a few CPU cores; the network has 0.1 million weights
Result:    87 % mean accuracy over the attributes (the paper, with networks pretrained on faces);
           not trained on CelebA here
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
    "data": "tfds:celeb_a",
    "model": "cnn",
    "set": {"batch_norm": True, "dropout": 0.2},
    "epochs": 10,
    "batch_size": 128,
    "learning_rate": 2e-3,
    "lr_rule": "cosine",
    "warmup_epochs": 0.5,
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {"batch_size": 16, "set": {"image_size": 32, "filters": [8, 16]}}

_NUM_ATTRIBUTES, _SIDE = 40, 8  # of the synthetic images; pixels of a square


class Hyperparameters(BaseModel):
    """Hyperparameters besides the arguments of the model, which `--set NAME=VALUE` sets."""

    image_size: int = Field(64, ge=8)  # height and width in pixels


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network for uint8 images, with one logit per attribute."""
    size = Hyperparameters.model_validate(config.set).image_size
    model = models.image_classifier(
        config.model, (size, size, 3), _NUM_ATTRIBUTES, config.set, scale=1 / 255
    )
    model.compile(
        optimizer=optimizers.create(config, schedules.learning_rate(config, steps_per_epoch)),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],  # of logits
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
    )
    return model


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches `(uint8 (batch, size, size, 3), float32 (batch, 40))`."""
    return _read(config, "train", augment_fn=lambda x, seed: (images.flip(x[0], seed), x[1]))


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches of the validation split, without augmentation."""
    return _read(config, "validation")


def _read(config: TrainConfig, split: str, **maps: Any) -> tf.data.Dataset:
    size = Hyperparameters.model_validate(config.set).image_size

    def example(record: Any) -> Any:
        return images.resize(record["image"], (size, size)), _attributes(record)

    data_set = data.DataSet(
        name="celeba",
        noise=(data.Noise((size, size, 3), "uint8", 256), data.Noise((40,), "uint8", 2)),
        num_examples={"train": 162_770, "validation": 19_867},
        features={"image": None, "attributes": _NUM_ATTRIBUTES},
        small=data.Small("2,048 drawn images of 40 squares", _FEATURES, _examples),
    )
    return data.read(
        config,
        data_set,
        split,
        decode_images=False,
        map_fn=example,
        batch_fn=lambda pixels, attributes: (pixels, tf.cast(attributes, tf.float32)),
        **maps,
    )


def _attributes(record: Any) -> tf.Tensor:
    """Returns the attributes in one order: one feature (official files) or 40 (`tfds:celeb_a`)."""
    if "attributes" in record:
        return tf.cast(record["attributes"], tf.uint8)
    names = sorted(name for name in record if name.startswith("attributes/"))
    return tf.stack([tf.cast(record[name], tf.uint8) for name in names])


_FEATURES = (
    pipelines.Feature(name="image", dtype="uint8", shape=(5 * _SIDE, 8 * _SIDE, 3), encoding="png"),
    pipelines.Feature(name="attributes", dtype="bool", shape=(40,), encoding="list"),
)


def _examples(split: str) -> Iterator[dict[str, object]]:
    """Yields images of 5 x 8 squares, each of which is bright if its attribute is true."""
    random = np.random.default_rng(["train", "validation"].index(split))
    for _ in range({"train": 2048, "validation": 512}[split]):
        attributes = random.random(_NUM_ATTRIBUTES) < 0.3
        light = attributes.reshape(5, 8, 1).repeat(_SIDE, 0).repeat(_SIDE, 1)
        pixels = 60 + 120 * light + random.normal(0, 25, (5 * _SIDE, 8 * _SIDE, 3))
        yield {"image": data.png(np.clip(pixels, 0, 255).astype("uint8")), "attributes": attributes}


if __name__ == "__main__":
    sys.exit(train.main(["--recipe", __file__, *sys.argv[1:]]))
