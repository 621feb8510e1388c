"""What of parts makes parts again: functions and layers that treat each channel alone."""

from __future__ import annotations

import keras
from keras import activations, layers

#: Functions of each value alone. Not `sigmoid`, whose logits a loss wants to know.
ELEMENTWISE = (
    activations.linear, activations.relu, activations.relu6, activations.leaky_relu,
    activations.elu, activations.selu, activations.celu, activations.gelu, activations.silu,
    activations.tanh, activations.softplus, activations.softsign, activations.mish,
    activations.hard_sigmoid, activations.exponential,
)  # fmt: skip

#: Layers of each channel alone, which may be called on parts of the channels.
_BY_CHANNEL = (
    layers.ReLU, layers.LeakyReLU, layers.ELU,
    layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D,
    layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D,
    layers.ZeroPadding1D, layers.ZeroPadding2D, layers.ZeroPadding3D,
)  # fmt: skip


def keeps_parts(layer: keras.Operation) -> bool:
    """Whether a layer makes parts of parts: it has no weights, and treats each channel alone."""
    if type(layer) is layers.Activation:
        return layer.activation in ELEMENTWISE
    return type(layer) in _BY_CHANNEL
