"""The input layers of all image networks."""

from __future__ import annotations

from collections.abc import Sequence

import keras


def pixels(
    input_shape: Sequence[int], scale: float | None, dtype_policy: str | None
) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Returns a model's input `(batch, *input_shape)`, and the input multiplied by `scale`.

    Args:
        input_shape: Shape of one image: height, width, channels.
        scale: Factor for the images; None: they are not scaled.
        dtype_policy: Name of the Keras dtype policy of the scaling; None: the global policy.
    """
    inputs = keras.Input(input_shape)
    if scale is None:
        return inputs, inputs
    return inputs, keras.layers.Rescaling(scale, dtype=dtype_policy)(inputs)
