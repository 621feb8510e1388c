"""Rows of a table of which each device has some: it looks up those that it has.

The split of an embedding by its vocabulary (Shoeybi et al. 2019, "Megatron-LM", section 3). There
each device gives zeros for what it has not, and all are added up; here it is not asked for that, so
that the slices of all parts' gradients are those of one device, and no row is multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf


def looked_up(
    layer: keras.layers.Embedding, parts: Sequence[tf.Tensor], ids: tf.Tensor
) -> tf.Tensor:
    """Returns what an Embedding makes of ids: its `call`, from parts of its table.

    Args:
        layer: Which.
        parts: Of its table, each on a device: rows in order, as many each as can be, what is over
            on the first ones, as `tf.nn.embedding_lookup` takes them.
        ids: Of any shape; those below 0 count from the end of the table, as in Keras.

    Returns:
        The rows, of the shape of the ids and the table's columns, in the layer's compute dtype.
    """
    if ids.dtype not in (tf.int32, tf.int64):
        ids = tf.cast(ids, tf.int32)
    ids = tf.where(ids < 0, ids + layer.input_dim, ids)
    return tf.cast(tf.nn.embedding_lookup(list(parts), ids), layer.compute_dtype)
