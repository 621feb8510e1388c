"""Inputs of a model's shapes, by which its layers are measured."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError


def rows_like(spec: keras.KerasTensor, num_rows: int, balance: str) -> tf.Tensor:
    """Returns rows that a model's input takes: random numbers, zeros of integers, empty texts.

    Args:
        spec: Of the input.
        num_rows: How many.
        balance: What is measured by them, as of `Pipeline`.

    Raises:
        ConfigurationError: The input has an unknown size.
    """
    shape = [num_rows, *spec.shape[1:]]
    if None in shape:
        raise ConfigurationError(
            f"balance={balance!r} measures layers on inputs of the model's shapes, but "
            f"{spec.name!r} is {tuple(spec.shape)}: give its Input all sizes, or use "
            "balance='parameters'."
        )
    if spec.dtype == "string":
        return tf.fill(shape, "")
    values = keras.random.normal(shape, seed=0) if "float" in spec.dtype else tf.zeros(shape)
    return tf.cast(values, spec.dtype)
