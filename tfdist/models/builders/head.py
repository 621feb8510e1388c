"""The output layer of all classifiers, and the input layers of image networks."""

from __future__ import annotations

from collections.abc import Sequence

import keras


def logits(x: keras.KerasTensor, num_classes: int, dtype_policy: str | None) -> keras.KerasTensor:
    """Returns one logit per class, in float32 under a mixed-precision policy."""
    return keras.layers.Dense(num_classes, dtype=dtype(dtype_policy), name="logits")(x)


def dtype(dtype_policy: str | None) -> str:
    """Returns the dtype policy of an output layer: float32 under a mixed-precision policy.

    A softmax cross entropy in 16 bits loses small probabilities (Micikevicius et al. 2018, "Mixed
    Precision Training", section 3.3). Under a pure policy (`float16`), this layer has 16 bits too.
    """
    policy = dtype_policy or keras.config.dtype_policy().name
    return "float32" if policy.startswith("mixed_") else policy


def pixels(
    input_shape: Sequence[int], scale: float | None, dtype_policy: str | None
) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Returns a model's input `(batch, *input_shape)`, and the input multiplied by `scale`."""
    inputs = keras.Input(input_shape)
    if scale is None:
        return inputs, inputs
    return inputs, keras.layers.Rescaling(scale, dtype=dtype_policy)(inputs)
