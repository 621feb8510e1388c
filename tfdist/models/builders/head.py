"""The last layer that all classifiers share."""

from __future__ import annotations

import keras


def logits(x: keras.KerasTensor, num_classes: int, dtype_policy: str | None) -> keras.KerasTensor:
    """Returns one logit per class, in float32 where the policy is a mixed one."""
    return keras.layers.Dense(num_classes, dtype=dtype(dtype_policy), name="logits")(x)


def dtype(dtype_policy: str | None) -> str:
    """Returns the policy of a last layer: float32 where that of the others is a mixed one.

    A softmax cross entropy in 16 bits loses small probabilities (Micikevicius et al. 2018, "Mixed
    Precision Training", section 3.3). A pure policy keeps its word: all of it is 16 bits.
    """
    policy = dtype_policy or keras.config.dtype_policy().name
    return "float32" if policy.startswith("mixed_") else policy
