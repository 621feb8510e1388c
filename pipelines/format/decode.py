"""The way from a `tf.train.Example` back to named features; `encode` is the way there.

`decode` takes one serialized record or a whole batch of them; a batch costs little more than one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from pipelines.errors import DataError
from pipelines.format.feature import Feature


def stored_dtype(feature: Feature) -> tf.DType:
    """The dtype inside the record: string for bytes, int64 or float32 for a list."""
    if feature.encoding != "list":
        return tf.string
    return tf.float32 if feature.dtype.startswith("float") else tf.int64


def decode(
    serialized: tf.Tensor, features: Sequence[Feature], *, decode_images: bool = True
) -> dict[str, tf.Tensor]:
    """Parses serialized records into arrays.

    Args:
        serialized: string tensor of shape `()` or `(batch,)`.
        features: those wanted, of the record's.
        decode_images: whether images become pixels; otherwise they stay the bytes of a file, for
            maps that decode only the region they need.

    Returns:
        By name, each feature in its dtype, of its shape behind `serialized`'s; a batch of arrays
        of different lengths is a `tf.RaggedTensor`.

    Raises:
        DataError: a batch of images of unknown size; such are decoded one record at a time.
    """
    stored = tf.io.parse_example(serialized, {f.name: _parser(f) for f in features})
    arrays = {}
    for feature in features:
        value = stored[feature.name]
        if feature.is_image and decode_images:
            value = _pixels(value, feature)
        elif feature.encoding == "raw":
            # The number of bytes is checked by this as well: a record of other size stops here.
            shape = tf.concat([tf.shape(value), tf.constant(feature.shape, tf.int32)], axis=0)
            value = tf.reshape(tf.io.decode_raw(value, feature.dtype), shape)
        elif feature.is_ragged and len(feature.shape) > 1:
            value = _rows(value, feature)
        if feature.encoding == "list":
            value = tf.cast(value, feature.dtype)
        arrays[feature.name] = value
    return arrays


def _parser(feature: Feature) -> tf.io.FixedLenFeature | tf.io.RaggedFeature:
    if feature.is_ragged:
        return tf.io.RaggedFeature(stored_dtype(feature))
    shape = feature.shape if feature.encoding in ("list", "bytes") else ()
    return tf.io.FixedLenFeature(shape, stored_dtype(feature))


def _rows(values: tf.Tensor | tf.RaggedTensor, feature: Feature) -> tf.Tensor | tf.RaggedTensor:
    """The flat values of a record, or of each of a batch, as arrays of the feature's inner dims."""
    inner = feature.shape[1:]
    if not isinstance(values, tf.RaggedTensor):
        return tf.reshape(values, (-1, *inner))
    size = math.prod(dim for dim in inner if dim is not None)
    whole = tf.debugging.assert_equal(
        values.row_splits % size,
        tf.zeros_like(values.row_splits),
        f"feature {feature.name!r}: a record holds no whole rows of shape {inner}",
    )
    with tf.control_dependencies([whole] if whole is not None else []):
        rows = tf.reshape(values.values, (-1, *inner))
        return tf.RaggedTensor.from_row_splits(rows, values.row_splits // size, validate=False)


def _pixels(encoded: tf.Tensor, feature: Feature) -> tf.Tensor:
    """Decodes one image, or a batch of images of one size."""

    def decode_one(image: tf.Tensor) -> tf.Tensor:
        if feature.encoding == "jpeg":
            pixels = tf.io.decode_jpeg(image, channels=feature.shape[2])
        else:
            pixels = tf.io.decode_png(image, channels=feature.shape[2], dtype=feature.dtype)
        return tf.ensure_shape(pixels, feature.shape)

    if encoded.shape.rank == 0:
        return decode_one(encoded)
    if None in feature.shape:
        raise DataError(
            f"feature {feature.name!r}: images of different sizes, {feature.shape}, make no batch; "
            "decode one record at a time and resize (map_fn), or pack with one --image-size"
        )
    return tf.map_fn(
        decode_one, encoded, fn_output_signature=tf.TensorSpec(feature.shape, feature.dtype)
    )
