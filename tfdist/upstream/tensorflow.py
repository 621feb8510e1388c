"""Private names of TensorFlow."""

from __future__ import annotations

from tensorflow.python.eager.context import global_seed


def has_global_seed() -> bool:
    """Tells whether a seed was set: `context.global_seed`; `tf.random.set_seed` has no getter."""
    return global_seed() is not None
