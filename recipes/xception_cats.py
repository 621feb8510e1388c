"""Cats and dogs: fine-tunes an Xception network that was pretrained on ImageNet.

Follows https://keras.io/guides/transfer_learning. In the first epochs only the head is trained.
Then a callback raises the backbone's learning rate from 0 to a small value; its BatchNorm layers
stay in inference mode. The recipe changes the rate and not `trainable`, because that would require
to compile the model again, which starts a new training.

Command:   python -m tfdist.train --recipe xception_cats --strategy mirrored
           --set weights=null starts from random weights, if Keras cannot download the others
Hardware:  one GPU
Result:    about 97 % validation accuracy, according to that guide; not trained here
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from keras import layers
from pydantic import BaseModel, Field

from pipelines.maps import images
from tfdist import data, models, schedules, train
from tfdist.config import TrainConfig
from tfdist.errors import MissingError

DEFAULTS: Mapping[str, Any] = {
    "data": "tfds:cats_vs_dogs",
    "model": "xception",
    "set": {"weights": "imagenet"},
    "epochs": 12,
    "batch_size": 64,
    "learning_rate": 1e-3,
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {
    "model": "cnn",
    "batch_size": 16,
    "set": {"image_size": 32, "filters": [8, 16]},
}

_NUM_CLASSES = 2
_FROZEN_EPOCHS = 2
_BACKBONE_OPTIMIZER = "backbone"


class Hyperparameters(BaseModel):
    """Hyperparameters besides the arguments of the model, which `--set NAME=VALUE` sets."""

    image_size: int = Field(150, ge=8)  # height and width in pixels
    frozen_epochs: int | None = Field(None, ge=0)  # default: 2, in short runs half of the epochs
    backbone_rate: float = Field(1e-5, gt=0)


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network for uint8 images.

    Raises:
        MissingError: Keras has no `MultiOptimizer`.
    """
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        raise MissingError(
            f"recipe xception_cats needs keras.optimizers.MultiOptimizer, which Keras "
            f"{keras.__version__} does not have: pip install 'keras>=3.15'."
        )
    size = Hyperparameters.model_validate(config.set).image_size
    shape = (size, size, 3)
    classifier = models.image_classifier(config.model, shape, _NUM_CLASSES, config.set)
    backbone = keras.Model(classifier.input, classifier.layers[-2].output, name="backbone")
    inputs = keras.Input(shape)
    x = layers.Rescaling(1 / 127.5, offset=-1)(inputs)  # the preprocessing of Xception's training
    x = layers.Dropout(0.2)(backbone(x, training=False))
    model = keras.Model(inputs, layers.Dense(_NUM_CLASSES, dtype="float32", name="head")(x))
    optimizer = keras.optimizers.OptimizerMap(
        keras.optimizers.Adam(schedules.learning_rate(config, steps_per_epoch), name="head")
    )
    backbone_optimizer = keras.optimizers.Adam(0.0, name=_BACKBONE_OPTIMIZER)
    for variable in backbone.trainable_variables:
        optimizer[variable.path] = backbone_optimizer
    model.compile(
        optimizer=keras.optimizers.MultiOptimizer(optimizer),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
    )
    return model


class UnfreezeBackbone(keras.callbacks.Callback):
    """Sets the learning rate of the backbone from a given epoch (from 0) onward."""

    def __init__(self, epoch: int, rate: float) -> None:
        super().__init__()
        self._epoch, self._rate = epoch, rate

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Sets the rate in every epoch, because a resumed training starts at a later one."""
        used = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        for optimizer in used.optimizers:
            if optimizer.name == _BACKBONE_OPTIMIZER:
                optimizer.learning_rate = self._rate if epoch >= self._epoch else 0.0


def callbacks(config: TrainConfig) -> list[keras.callbacks.Callback]:
    """Returns the callback that unfreezes the backbone."""
    hp = Hyperparameters.model_validate(config.set)
    frozen = min(_FROZEN_EPOCHS, config.epochs // 2)
    epoch = frozen if hp.frozen_epochs is None else hp.frozen_epochs
    return [UnfreezeBackbone(epoch, hp.backbone_rate)]


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches `(uint8 (batch, size, size, 3), int64 (batch,))`."""
    return _read(config, "train", augment_fn=lambda x, seed: (images.flip(x[0], seed), x[1]))


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns batches of the last tenth of the images, without augmentation."""
    return _read(config, "validation")


def _read(config: TrainConfig, split: str, **maps: Any) -> tf.data.Dataset:
    size = Hyperparameters.model_validate(config.set).image_size
    data_set = data.DataSet(
        name="cats",
        noise=(data.Noise((size, size, 3), "uint8", 256), data.Noise((), "int64", _NUM_CLASSES)),
        num_examples={"train": 20_936, "validation": 2_326},
        features={"image": None, "label": _NUM_CLASSES},
        small=data.drawn_images(72, _NUM_CLASSES),
        splits={"train": "train[:90%]", "validation": "train[90%:]"},
    )

    def example(record: Any) -> Any:
        return images.resize(record["image"], (size, size)), record["label"]

    return data.read(config, data_set, split, decode_images=False, map_fn=example, **maps)


if __name__ == "__main__":
    sys.exit(train.main(["--recipe", __file__, *sys.argv[1:]]))
