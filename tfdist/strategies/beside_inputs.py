"""A device function: what is computed from something is computed where that is."""

from __future__ import annotations

import tensorflow as tf


def beside_inputs(operation: tf.Operation) -> str:
    """Returns the device of the first of an operation's inputs that has one, or its own.

    For `tf.compat.v1.device`: an update of weights on several devices then stays on each of them.
    """
    devices = (tensor.device for tensor in operation.inputs)
    return operation.device or next((device for device in devices if device), "")
