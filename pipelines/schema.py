"""The way of named features into a `tf.train.Example` and back.

`decode` takes one serialized record or a whole batch of them; a batch costs little more than one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from pipelines.errors import DataError
from pipelines.feature import Feature, image_format


def stored_dtype(feature: Feature) -> tf.DType:
    """The dtype inside the record: string for bytes, int64 or float32 for a list."""
    if feature.encoding != "list":
        return tf.string
    return tf.float32 if feature.dtype.startswith("float") else tf.int64


def encode(example: Mapping[str, object], features: Sequence[Feature]) -> bytes:
    """Serializes one example.

    Args:
        example: for each feature's name a value that NumPy takes as an array of exactly the
            feature's shape, and whose values its dtype can hold; text or bytes for a string; the
            bytes of a file for an image.
        features: all features of the record.

    Returns:
        The serialized `tf.train.Example`.

    Raises:
        DataError: a feature is missing, unknown, of another shape, or would change its values.
    """
    names = [feature.name for feature in features]
    if set(example) != set(names):
        raise DataError(
            f"expected the features {sorted(names)}, got {sorted(example)}; give each example "
            "exactly the declared features"
        )
    stored = {f.name: _to_message(example[f.name], f) for f in features}
    message = tf.train.Example(features=tf.train.Features(feature=stored))
    return bytes(message.SerializeToString(deterministic=True))


def decode(
    serialized: tf.Tensor, features: Sequence[Feature], *, decode_images: bool = True
) -> dict[str, tf.Tensor]:
    """Parses serialized records into arrays.

    Args:
        serialized: string tensor of shape `()` or `(batch,)`.
        features: those wanted, of the record's.
        decode_images: whether images become pixels; otherwise they stay the bytes of a file, for
            maps that decode only the part they need.

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


def _to_message(value: object, feature: Feature) -> tf.train.Feature:
    if feature.is_image:
        return _bytes_list([_checked_image(value, feature)])
    if feature.dtype == "string":
        return _bytes_list(_checked_strings(value, feature))
    array = _checked_numbers(value, feature)
    if feature.encoding == "raw":
        little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return _bytes_list([little_endian.tobytes()])
    if stored_dtype(feature) == tf.float32:
        return tf.train.Feature(
            float_list=tf.train.FloatList(value=array.ravel().astype(np.float32))
        )
    return tf.train.Feature(int64_list=tf.train.Int64List(value=array.ravel().astype(np.int64)))


def _bytes_list(values: list[bytes]) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def _checked_image(value: object, feature: Feature) -> bytes:
    if isinstance(value, bytes) and image_format(value) == feature.encoding:
        return value
    came = f"bytes that begin with {value[:8]!r}" if isinstance(value, bytes) else type(value)
    raise DataError(
        f"feature {feature.name!r}: expected the bytes of a {feature.encoding} file, got {came}"
    )


def _checked_strings(value: object, feature: Feature) -> list[bytes]:
    """The strings in the order of the array; a NumPy array would cut trailing zero bytes."""
    array = np.empty((), object)
    array[()] = value
    if feature.shape:
        array = np.array(value, dtype=object)
    if not _same_shape(array.shape, feature) or not all(
        isinstance(element, str | bytes) for element in array.ravel()
    ):
        raise DataError(
            f"feature {feature.name!r}: expected text or bytes of shape {feature.shape}, got "
            f"{type(value).__name__} of shape {array.shape}"
        )
    return [e.encode() if isinstance(e, str) else e for e in array.ravel()]


def _checked_numbers(value: object, feature: Feature) -> np.ndarray:
    """The value as an array of the feature's dtype, refused where that would change it."""
    array = np.asarray(value)
    if not _same_shape(array.shape, feature) or array.dtype.kind not in "biuf":
        raise DataError(
            f"feature {feature.name!r}: expected {feature.dtype} of shape {feature.shape}, got "
            f"{array.dtype} of shape {array.shape}; convert the value or declare it so"
        )
    with np.errstate(all="ignore"):  # what overflows is refused by the comparison below
        cast = array.astype(feature.dtype)
    if cast.dtype != array.dtype and not np.array_equal(cast, array, equal_nan=True):
        raise DataError(
            f"feature {feature.name!r}: {feature.dtype} cannot hold every value of this "
            f"{array.dtype} array; convert it yourself or declare {array.dtype}"
        )
    return cast


def _same_shape(shape: tuple[int, ...], feature: Feature) -> bool:
    if feature.is_ragged and shape == (0,):  # [], whatever its elements would have looked like
        return True
    return len(shape) == len(feature.shape) and all(
        dim in (None, came) for dim, came in zip(feature.shape, shape, strict=True)
    )
