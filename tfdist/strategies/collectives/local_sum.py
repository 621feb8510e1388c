"""What has come to one device is added up there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def local_sum(terms: Sequence[Any]) -> Any:
    """Adds dense tensors, or lays slices of an embedding's gradient end to end."""
    if not isinstance(terms[0], tf.IndexedSlices):
        return tf.add_n(list(terms))
    return tf.IndexedSlices(
        tf.concat([term.values for term in terms], 0),
        tf.concat([term.indices for term in terms], 0),
        terms[0].dense_shape,
    )
