"""Model and data of the basic recipes, which differ only in their strategy.

A network of two layers, trained by SGD with momentum on the digits of scikit-learn: 1,797 images
of 8x8 pixels. A fifth of them, by other writers, is held out.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from tfdist import models, schedules
from tfdist.config import TrainConfig

NUM_TRAINING = 1437  # images


def build_model(config: TrainConfig, steps_per_epoch: int | None) -> keras.Model:
    """Returns the compiled network."""
    model = models.mlp((64,), 10, units=(128,))
    rate = schedules.learning_rate(config, steps_per_epoch)
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=config.jit_compile,
        run_eagerly=config.run_eagerly,
    )
    return model


def train_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns global batches `(float32 (batch, 64), int64 (batch,))`, shuffled by the seed."""
    rows = _digits(slice(NUM_TRAINING))
    return rows.shuffle(NUM_TRAINING, seed=config.seed).batch(config.batch_size)


def validation_data(config: TrainConfig) -> tf.data.Dataset:
    """Returns the held-out images as `train_data` does, in a fixed order."""
    return _digits(slice(NUM_TRAINING, None)).batch(config.batch_size)


def _digits(part: slice) -> tf.data.Dataset:
    images, labels = load_digits(return_X_y=True)
    return tf.data.Dataset.from_tensor_slices((images[part].astype("float32") / 16, labels[part]))
