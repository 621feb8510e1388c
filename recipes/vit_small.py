"""A small vision transformer on ImageNet, by a simple recipe.

Beyer, Zhai and Kolesnikov 2022, "Better plain ViT baselines for ImageNet-1k": batches of 1,024, a
learning rate of 1e-3 after 10,000 warm-up steps, weight decay 1e-4, random crops and flips,
RandAugment of level 10, MixUp 0.2. Position embeddings are learned here; the paper's are sines.

Command:   python -m pipelines.pack imagenet/ data/imagenet/train --split train, also validation
           python -m tfdist.train --recipe vit_small --data data/imagenet --strategy mirrored
Small:     ... --data small --set size=micro --set patch=8 --set image_size=32 --set randaugment=0
           --set mixup=0 --batch-size 64 --epochs 10 --warmup-epochs 1
Hardware:  8 GPUs; two CPU cores for the synthetic images of `--data small`
Result:    76.5 % validation accuracy after 90 epochs (the paper; not reproduced here). `--data
           small`: 100 % of 512 validation images with a loss of 0.08, below 0.2 from the fifth
           epoch on, in 40 s of CPU time on two cores
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from pydantic import BaseModel, Field

from pipelines.maps.layers import mixed, seeded
from tfdist import data, models, optimizers, schedules, train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "data": "tfds:imagenet2012",
    "model": "vit",
    "set": {"size": "small", "patch": 16},
    "epochs": 90,
    "batch_size": 1024,
    "learning_rate": 1e-3,
    "lr_rule": "cosine",
    "warmup_epochs": 8,  # 10,000 steps of 1,024
    "weight_decay": 1e-4,
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {
    "batch_size": 16,
    "set": {"size": "micro", "patch": 8, "image_size": 32, "randaugment": 1},
}

_NUM_CLASSES = 1000


class Hyperparameters(BaseModel):
    """Hyperparameters besides the arguments of the model, which `--set NAME=VALUE` sets."""

    image_size: int = Field(224, ge=8)  # height and width in pixels
    mixup: float = Field(0.2, ge=0)  # alpha of the beta distribution; 0: no MixUp
    randaugment: int = Field(2, ge=0)  # number of RandAugment operations of half strength; 0: none


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network for uint8 images."""
    size = Hyperparameters.model_validate(config.set).image_size
    model = models.image_classifier(
        config.model, (size, size, 3), _NUM_CLASSES, config.set, scale=1 / 255
    )
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
    """Returns global batches `(uint8 (batch, size, size, 3), float32 (batch, 1000))`."""
    hp = Hyperparameters.model_validate(config.set)
    layer = keras.layers.RandAugment((0, 255), max(hp.randaugment, 1), factor=0.5)
    return data.imagenet(
        config,
        "train",
        hp.image_size,
        change_fn=seeded(layer) if hp.randaugment else None,
        mix_fn=mixed(keras.layers.MixUp(hp.mixup)) if hp.mixup else None,
    )


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns batches of center crops of the validation images, in a fixed order."""
    size = Hyperparameters.model_validate(config.set).image_size
    return data.imagenet(config, "validation", size)


if __name__ == "__main__":
    sys.exit(train.main(["--recipe", __file__, *sys.argv[1:]]))
