"""Your own images in one folder per class: trains any network and plots a confusion matrix.

The folder determines the classes and the splits. Images of any size and format are packed once.

Command:   python -m tfdist.train --recipe image_folder --data photos/ --strategy mirrored
           with photos/cat/1.jpg, photos/dog/2.jpg, ... or photos/train/cat/..., photos/val/cat/...
Network:   --model resnet18 (or any other of tfdist.models), --model keras_application
           --set application=EfficientNetV2B0 --set weights=imagenet (or the path of a file)
Try it:    ... --data small: synthetic images of three classes
Result:    100 % validation accuracy after 3 epochs of --data small with --set image_size=32 --set
           width=16
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from pydantic import BaseModel, Field

import pipelines
import tfdist
from pipelines.maps import images
from pipelines.maps.layers import mixed, seeded
from recipes import _class_folders, _plots
from tfdist import data, models, optimizers, schedules, train
from tfdist.config import TrainConfig
from tfdist.errors import ConfigurationError

DEFAULTS: Mapping[str, Any] = {
    "model": "resnet18",
    # Small data sets have few steps, in which averages with momentum 0.99 would hardly change.
    "set": {"batch_norm_momentum": 0.9},
    "epochs": 20,
    "batch_size": 32,
    "learning_rate": 1e-3,
    "lr_rule": "cosine",
    "warmup_epochs": 0.5,
}
#: Overrides for `--smoke`.
SMOKE: Mapping[str, Any] = {
    "batch_size": 8,
    # A convolution of TensorFlow 2.21 for CPUs (oneDNN) writes beyond its memory at width 8.
    "set": {"image_size": 64, "width": 16, "num_blocks": [1, 1], "randaugment": 0},
}

#: Smallest image size, in pixels, for a ResNet whose stem reduces each side to a quarter.
_LARGE_STEM = 96


class Hyperparameters(BaseModel):
    """Hyperparameters besides the arguments of the model, which `--set NAME=VALUE` sets."""

    image_size: int = Field(160, ge=8)  # height and width in pixels
    flip: bool = True  # flip half of the training images horizontally
    min_crop: float = Field(0.35, gt=0, le=1)  # smallest part of an image's area to train on
    randaugment: int = Field(0, ge=0)  # number of RandAugment operations; 0: none
    mixup: float = Field(0.0, ge=0)  # alpha of MixUp's beta distribution; 0: no MixUp
    class_weights: Literal["none", "balanced"] = "none"
    weights: str | None = None  # imagenet, or the path of a .keras or .weights.h5 file
    frozen: bool = False  # train the last layer only
    splits: str | None = None  # names of the splits as train=Trn,validation=Tst, or none
    skip_damaged: bool = False  # leave out images that cannot be decoded
    classes: int = Field(3, ge=2)  # number of classes of --data synthetic


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network, with one logit per class, for uint8 images."""
    hp = Hyperparameters.model_validate(config.set)
    shape, num_classes = (hp.image_size, hp.image_size, 3), len(_classes(config))
    settings = dict(config.set)
    if "stem" in models.options(str(config.model)):
        settings.setdefault("stem", "large" if hp.image_size >= _LARGE_STEM else "small")
    has_weights_option = "weights" in models.options(str(config.model))
    builder_loads = has_weights_option and not _is_keras_file(hp.weights)
    if not builder_loads:
        settings.pop("weights", None)
    model = models.image_classifier(config.model, shape, num_classes, settings, scale=1 / 255)
    if hp.weights not in (None, "none") and not builder_loads:
        load_weights(model, str(hp.weights))
    if hp.frozen:
        for layer in model.layers[:-1]:
            layer.trainable = False
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


def load_weights(model: keras.Model, file: str) -> None:
    """Loads the weights of all layers whose shapes match: the last layer may differ.

    Args:
        model: Receives the weights.
        file: A `.keras` or `.weights.h5` file.

    Raises:
        ConfigurationError: The file cannot be read, or nothing in it matches.
    """
    if not Path(file).is_file():
        raise ConfigurationError(f"weights={file}: there is no such file.")
    if not _is_keras_file(file):
        model.load_weights(file, skip_mismatch=True)
        return
    saved = [x for x in keras.saving.load_model(file, compile=False).layers if x.weights]
    num_loaded = 0
    for layer, old in zip((x for x in model.layers if x.weights), saved, strict=False):
        if [w.shape for w in old.weights] == [w.shape for w in layer.weights]:
            layer.set_weights(old.get_weights())
            num_loaded += 1
    if not num_loaded:
        raise ConfigurationError(
            f"weights={file}: the shapes of its layers do not match this network. "
            "Choose the network that was saved there."
        )


def _is_keras_file(weights: str | None) -> bool:
    return str(weights).endswith(".keras")


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches `(uint8 images, one-hot labels)`, and weights with class_weights."""
    hp = Hyperparameters.model_validate(config.set)
    size = (hp.image_size, hp.image_size)
    if tfdist.is_chief() and config.verbose != 0:
        _advise(config, hp.image_size)
    rand_augment = seeded(keras.layers.RandAugment((0, 255), max(hp.randaugment, 1), factor=0.5))

    def augment(record: Any, seed: tf.Tensor) -> Any:
        pixels = images.random_crop(record["image"], seed, size, area=(hp.min_crop, 1.0))
        pixels = images.flip(pixels, seed) if hp.flip else pixels
        return rand_augment(pixels, seed) if hp.randaugment else pixels, record["label"]

    mix = mixed(keras.layers.MixUp(hp.mixup)) if hp.mixup else None
    batches = _read(config, "train", augment_fn=augment, mix_fn=mix)
    if hp.class_weights == "none" or config.data == data.SYNTHETIC:
        return batches
    return _class_folders.with_class_weights(batches, _folders(config))


def _advise(config: TrainConfig, image_size: int) -> None:
    """Prints flags for a quick start if the images are large for a host without GPUs."""
    if image_size >= _LARGE_STEM and not tf.config.list_physical_devices("GPU"):
        narrow = " --set width=16" if "width" in models.options(str(config.model)) else ""
        print(
            f"Without GPUs, an epoch with images of {image_size}x{image_size} pixels may take "
            f"minutes. Quick start: --set image_size=64{narrow}",
            file=sys.stderr,
        )


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns the held-out images as `(uint8 images, one-hot labels)`, in a fixed order."""
    size = Hyperparameters.model_validate(config.set).image_size

    def resize(record: Any) -> Any:
        return images.resize(record["image"], (size, size)), record["label"]

    return _read(config, "validation", map_fn=resize)


def report(config: TrainConfig, model: keras.Model, folder: Path) -> list[str]:
    """Draws the confusion matrix and the worst predictions into the run folder.

    Args:
        config: Configuration of the run.
        model: The trained network.
        folder: The run folder.

    Returns:
        The names of the files.
    """
    labels: list[int] = []
    logits: list[np.ndarray] = []
    worst: list[tuple[float, int, np.ndarray]] = []
    for pixels, one_hot in validation_data(config).take(3 if config.smoke else -1):
        outputs = np.asarray(model(pixels, training=False), np.float32)
        losses = tf.nn.softmax_cross_entropy_with_logits(one_hot, outputs).numpy()
        labels.extend(one_hot.numpy().argmax(-1))
        logits.extend(outputs)
        first = len(labels) - len(losses)
        worst += [(-loss, first + i, pixels[i].numpy()) for i, loss in enumerate(losses)]
        worst = heapq.nsmallest(_plots.NUM_WORST, worst, key=lambda item: item[0])
    classes, true, numbers = _classes(config), np.array(labels), [item[1] for item in worst]
    _plots.confusion_matrix(true, np.argmax(logits, -1), classes, folder / "confusion_matrix.png")
    _plots.worst_predictions(
        np.stack([item[2] for item in worst]),
        true[numbers],
        tf.nn.softmax(np.array(logits)[numbers]).numpy(),
        classes,
        folder / "worst_predictions.png",
    )
    return ["confusion_matrix.png", "worst_predictions.png"]


def _read(config: TrainConfig, split: str, mix_fn: Any = None, **maps: Any) -> tf.data.Dataset:
    num_classes = len(_classes(config))

    def to_one_hot(pixels: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return pixels, tf.one_hot(labels, num_classes)

    if config.data == data.SYNTHETIC:
        return data.read(config, _noise(config, num_classes), split, batch_fn=to_one_hot)
    folders, is_training = _folders(config), split == "train"
    return pipelines.read(
        folders.train if is_training else folders.validation,
        config.batch_size,
        shuffle_buffer=10_000 if is_training else 0,
        seed=config.seed,
        decode_images=False,
        batch_fn=to_one_hot,
        mix_fn=mix_fn,
        **maps,
    )


def _noise(config: TrainConfig, num_classes: int) -> data.DataSet:
    size = Hyperparameters.model_validate(config.set).image_size
    return data.DataSet(
        name="image_folder",
        noise=(data.Noise((size, size, 3), "uint8", 256), data.Noise((), "int64", num_classes)),
        num_examples={"train": 2048, "validation": 512},
    )


def _classes(config: TrainConfig) -> tuple[str, ...]:
    if config.data == data.SYNTHETIC:
        return tuple(map(str, range(Hyperparameters.model_validate(config.set).classes)))
    return _folders(config).classes


def _folders(config: TrainConfig) -> _class_folders.ClassFolders:
    names = tuple(f"class {i}" for i in range(3))
    small = data.drawn_images(32, 3, names)
    hp = Hyperparameters.model_validate(config.set)
    # The maps decode three channels of 8 bits. What is no JPEG is encoded again in a mixed folder.
    options = {"image_format": "auto", "channels": 3, "bits": 8, "splits": hp.splits}
    options |= {"skip_damaged": True} if hp.skip_damaged else {}
    return _class_folders.prepare(config, "image_folder", small, kind="images", **options)


if __name__ == "__main__":
    sys.exit(train.main(["--recipe", __file__, *sys.argv[1:]]))
