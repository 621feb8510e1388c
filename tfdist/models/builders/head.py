"""The output layer of all classifiers."""

from __future__ import annotations

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
