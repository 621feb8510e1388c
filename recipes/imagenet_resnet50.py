"""ResNet-50 on ImageNet with the large-batch schedule of Goyal et al.

Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour": a learning rate of
0.1 per 256 images of the batch, reached after five warm-up epochs and divided by 10 at epochs 30,
60 and 80; 90 epochs; momentum 0.9; weight decay 1e-4 except for biases and BatchNorm; each block
starts as the identity. Keras's ResNet-50 has the strides in the first convolution of a bottleneck,
the paper's in the second.

Command:   python -m pipelines.pack imagenet/ data/imagenet/train --split train
           python -m pipelines.pack imagenet/ data/imagenet/validation --split validation
           python -m tfdist.launch --hosts ... -- --recipe imagenet_resnet50 --strategy horovod
           --batch-size 8192 --data data/imagenet --precision mixed_float16
           --data synthetic measures speed only, --data small uses synthetic images
Hardware:  8 to 256 GPUs with a per-replica batch of 32
Result:    76.4 % validation accuracy with batch size 256, 76.3 % with 8,192 (the paper, table 1);
           not trained here
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from pydantic import BaseModel, Field

from tfdist import data, models, optimizers, schedules, train
from tfdist.config import TrainConfig

DEFAULTS: Mapping[str, Any] = {
    "data": "tfds:imagenet2012",
    "model": "resnet50",
    "set": {"zero_gamma": True},
    "epochs": 90,
    "batch_size": 256,
    "optimizer": "sgd",
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "learning_rate": 0.1,
    "lr_scaling": "linear",
    "lr_reference_batch": 256,
    "lr_rule": "step",
    "lr_decay_epochs": [30, 60, 80],
    "lr_decay_factor": 0.1,
    "warmup_epochs": 5,
    "warmup_start": 0.1,  # for every batch size: section 2.2
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {
    "model": "resnet18",
    "batch_size": 16,
    "set": {"image_size": 32, "width": 8, "num_blocks": [1, 1]},
}

_NUM_CLASSES = 1000


class Hyperparameters(BaseModel):
    """Hyperparameters besides the arguments of the model, which `--set NAME=VALUE` sets."""

    image_size: int = Field(224, ge=8)  # height and width in pixels


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
        metrics=["accuracy", keras.metrics.TopKCategoricalAccuracy(5, name="top_5")],
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
    )
    return model


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches `(uint8 (batch, size, size, 3), float32 (batch, 1000))`."""
    return data.imagenet(config, "train", Hyperparameters.model_validate(config.set).image_size)


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns batches of center crops of the validation images, in a fixed order."""
    size = Hyperparameters.model_validate(config.set).image_size
    return data.imagenet(config, "validation", size)


if __name__ == "__main__":
    sys.exit(train.main(["--recipe", __file__, *sys.argv[1:]]))
