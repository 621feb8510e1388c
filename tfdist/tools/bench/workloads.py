"""The models and data of the training benchmarks. Importing it imports no TensorFlow."""

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
#: Number of different batches in memory, which are repeated.
_NUM_BATCHES = 8


@dataclass(frozen=True)
class Workload:
    """A model, its data, and the length of a measurement.

    Attributes:
        model: Name of a function of `tfdist.models`.
        options: Arguments of the function in addition to shape and classes.
        input_shape: Shape of one example.
        dtype: Type of the examples in the data set.
        batch_size: Global batch size.
        num_steps: Steps per measurement, for a few tenths of a second on two CPU cores.
        tiny_options: Options that make the model compile quickly, for smoke runs.
        precision: Keras dtype policy, such as `mixed_float16`.
        jit_compile: Whether XLA compiles steps, as for `compile`.
    """

    model: str
    options: dict[str, Any]
    input_shape: tuple[int, ...]
    dtype: str
    batch_size: int
    num_steps: int
    tiny_options: dict[str, Any] = field(default_factory=dict)
    precision: str = "float32"
    jit_compile: bool | str = False

    def build_model(self, **compile_options: Any) -> keras.Model:
        """Returns the compiled model, always with the same initial weights."""
        import keras

        from tfdist import models

        # Keras's initializers get their seeds from `random`. Setting TensorFlow's seed would
        # discard compiled functions.
        random.seed(0)
        model = getattr(models, self.model)(self.input_shape, NUM_CLASSES, **self.options)
        # SGD has the fewest operations of the common optimizers, which makes overhead most visible.
        model.compile(
            keras.optimizers.SGD(1e-3, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=self.jit_compile,
            **compile_options,
        )
        return model

    def data(self) -> tf.data.Dataset:
        """Returns an endless dataset of full batches in memory, so that reading is not measured."""
        import tensorflow as tf

        rng, rows = np.random.default_rng(0), _NUM_BATCHES * self.batch_size
        x = rng.integers(0, 256, (rows, *self.input_shape), np.uint8)
        x = x if self.dtype == "uint8" else (x / np.float32(255)).astype(self.dtype)
        y = rng.integers(0, NUM_CLASSES, rows)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(self.batch_size, True)
        return batches.cache().repeat().prefetch(tf.data.AUTOTUNE)

    def tiny(self) -> Workload:
        """Returns a small, fast workload for smoke runs."""
        return dataclasses.replace(
            self, options=self.options | self.tiny_options, batch_size=8, num_steps=4
        )


WORKLOADS = {
    # 4,000 weights and little arithmetic, so that overhead dominates.
    "mlp": Workload("mlp", {}, (64,), "float32", 64, 512),
    # The network of the default recipe: 120,000 weights, 8x8 images.
    "cnn": Workload("cnn", {"scale": 1 / 255}, (8, 8, 1), "uint8", 64, 64),
    # ResNet-18 with a quarter of the width: 700,000 weights, 20 BatchNorm layers.
    "resnet": Workload(
        "resnet18", {"width": 16}, (32, 32, 3), "float32", 32, 6, {"num_blocks": (1,)}
    ),
    # ResNet-50 on ImageNet's size, for GPUs.
    "resnet50": Workload("resnet50", {}, (224, 224, 3), "float32", 64, 20),
}
#: Default workloads, which train in seconds on two CPU cores.
DEFAULT = ("mlp", "cnn", "resnet")
