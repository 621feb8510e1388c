"""Parses serialized `tf.train.Example` records to named arrays, in a TensorFlow graph.

A whole batch costs little more than one record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from pipelines import upright
from pipelines.errors import DataError
from pipelines.format.encoding import encode as encode
from pipelines.format.feature import Feature


def stored_dtype(feature: Feature) -> tf.DType:
    """Returns the dtype inside the record: string for bytes, int64 or float32 for a list."""
    if feature.encoding != "list":
        return tf.string
    return tf.float32 if feature.dtype.startswith("float") else tf.int64


@tf.autograph.experimental.do_not_convert  # which would take most of the time of tracing
def decode(
    serialized: tf.Tensor, features: Sequence[Feature], *, decode_images: bool = True
) -> dict[str, tf.Tensor]:
    """Parses serialized records into arrays.

    Args:
        serialized: String tensor of shape `()` or `(batch,)`.
        features: The features to parse, all or some of the record's.
        decode_images: Whether to decode images to pixels. Otherwise they remain the bytes of an
            image file, for map functions that decode only the region they need.

    Returns:
        A dictionary by feature name. Each tensor has the feature's dtype and the shape of
        `serialized` followed by the feature's shape. Arrays of different lengths in a batch form a
        `tf.RaggedTensor`.

    Raises:
        DataError: `serialized` is a batch, and its images have different sizes.
    """
    stored = tf.io.parse_example(serialized, {f.name: _parser(f) for f in features})
    arrays = {}
    for feature in features:
        value = stored[feature.name]
        if feature.is_image and decode_images:
            value = _pixels(value, feature)
        elif feature.encoding == "raw":
            # The reshape also checks the number of bytes.
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
    """Reshapes the flat values of a record, or of each record of a batch, to the inner shape."""
    inner = feature.shape[1:]
    if not isinstance(values, tf.RaggedTensor):
        return tf.reshape(values, (-1, *inner))
    size = math.prod(dim for dim in inner if dim is not None)
    whole = tf.debugging.assert_equal(
        values.row_splits % size,
        tf.zeros_like(values.row_splits),
        f"feature {feature.name!r}: the number of values in a record is not a multiple of {inner}",
    )
    with tf.control_dependencies([whole] if whole is not None else []):
        rows = tf.reshape(values.values, (-1, *inner))
        return tf.RaggedTensor.from_row_splits(rows, values.row_splits // size, validate=False)


def _pixels(encoded: tf.Tensor, feature: Feature) -> tf.Tensor:
    def decode_one(image: tf.Tensor) -> tf.Tensor:
        if feature.encoding == "jpeg":
            pixels = tf.io.decode_jpeg(image, channels=feature.shape[2])
        else:
            pixels = tf.io.decode_png(image, channels=feature.shape[2], dtype=feature.dtype)
        return tf.ensure_shape(upright.turn(pixels, upright.orientation(image)), feature.shape)

    if encoded.shape.rank == 0:
        return decode_one(encoded)
    if None in feature.shape:
        raise DataError(
            f"feature {feature.name!r}: images of different sizes, {feature.shape}, cannot form a "
            "batch; decode and resize one record at a time (map_fn), or pack with --image-size"
        )
    return tf.map_fn(
        decode_one, encoded, fn_output_signature=tf.TensorSpec(feature.shape, feature.dtype)
    )
