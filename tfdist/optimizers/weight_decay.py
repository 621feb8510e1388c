"""Excludes biases, and the scale and shift of normalization layers, from weight decay."""

from __future__ import annotations

import keras

#: Parts of the names that Keras's layers give to these weights.
NOT_DECAYED = ("bias", "gamma", "beta")


def leave_biases_and_norms(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Excludes biases, and the scale and offset of normalization layers, from weight decay.

    Example:
        >>> optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.01)
        >>> optimizers.leave_biases_and_norms(optimizer) is optimizer
        True

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 5.1 ("We do not apply weight
    decay on the learnable BN coefficients"); He et al. 2019, "Bag of Tricks for Image
    Classification with Convolutional Neural Networks", section 3.1 (for biases).

    Args:
        optimizer: A Keras optimizer that is not built yet. `LARS` and `MomentumSGD` exclude these
            weights by default.

    Returns:
        The same optimizer.
    """
    optimizer.exclude_from_weight_decay(var_names=list(NOT_DECAYED))
    return optimizer
