"""The way of named features into a `tf.train.Example`: what would not come back is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from pipelines.errors import DataError
from pipelines.format.decode import stored_dtype
from pipelines.format.feature import Feature, image_format


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
