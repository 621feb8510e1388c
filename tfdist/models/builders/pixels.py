"""The first layers that all image networks share."""

from __future__ import annotations

from collections.abc import Sequence

import keras


def pixels(
    input_shape: Sequence[int], scale: float | None, dtype_policy: str | None
) -> tuple[keras.KerasTensor, keras.KerasTensor]:
    """Returns a model's input `(batch, *input_shape)`, and the same multiplied by `scale`.

    Args:
        input_shape: Of one image: height, width, channels.
        scale: None leaves the images as they are.
        dtype_policy: Name of the Keras policy of the scaling; None: the global one.
    """
    inputs = keras.Input(input_shape)
    if scale is None:
        return inputs, inputs
    return inputs, keras.layers.Rescaling(scale, dtype=dtype_policy)(inputs)
