"""What every contender trains: the same models, losses and data. Imports no TensorFlow at first."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

NUM_CLASSES = 10
#: Global batches that are kept in memory and come again and again.
_NUM_BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """A model, its data, and how many steps make a measurement.

    Attributes:
        model: A function of `tfdist.models`.
        options: Its arguments besides shape and classes.
        input_shape: Of one example.
        dtype: Of the examples as they come from the data set.
        batch_size: Global.
        num_steps: Of a measurement: some tenths of a second on two cores.
        tiny_options: What replaces `options` where the model shall compile in a moment.
    """

    model: str
    options: dict[str, Any]
    input_shape: tuple[int, ...]
    dtype: str
    batch_size: int
    num_steps: int
    tiny_options: dict[str, Any] = field(default_factory=dict)

    def build_model(self, **compile_options: Any) -> keras.Model:
        """Returns the compiled model; always with the same weights."""
        import keras

        from tfdist import models

        # Keras's initialisers draw their seeds there. TensorFlow's own seed is left alone: to set
        # it throws away what is compiled already.
        random.seed(0)
        model = getattr(models, self.model)(self.input_shape, NUM_CLASSES, **self.options)
        # Of the optimizers in use the one of fewest operations: it hides least of what is ours.
        model.compile(
            keras.optimizers.SGD(1e-3, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            **compile_options,
        )
        return model

    def data(self) -> tf.data.Dataset:
        """Returns endless even global batches from memory: reading data is not measured here."""
        import tensorflow as tf

        rng, rows = np.random.default_rng(0), _NUM_BATCHES * self.batch_size
        x = rng.integers(0, 256, (rows, *self.input_shape))
        x = x.astype(self.dtype) if self.dtype == "uint8" else (x / 255).astype(self.dtype)
        y = rng.integers(0, NUM_CLASSES, rows)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(self.batch_size, True)
        return batches.cache().repeat().prefetch(tf.data.AUTOTUNE)

    def tiny(self) -> Workload:
        """Returns a workload that is done in a moment, to see that everything runs."""
        return dataclasses.replace(
            self, options=self.options | self.tiny_options, batch_size=8, num_steps=4
        )


WORKLOADS = {
    # 4,000 weights: next to no arithmetic, so that what is measured is everything else.
    "mlp": Workload("mlp", {}, (64,), "float32", 64, 512),
    # The network of the default recipe: 120,000 weights on images of 8 x 8.
    "cnn": Workload("cnn", {"scale": 1 / 255}, (8, 8, 1), "uint8", 64, 64),
    # ResNet-18 of a quarter of the width: 700,000 weights, 20 BatchNorm layers.
    "resnet": Workload(
        "resnet18", {"width": 16}, (32, 32, 3), "float32", 32, 6, {"num_blocks": (1,)}
    ),
}
