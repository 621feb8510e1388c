"""Conversion between named arrays and serialized `tf.train.Example` records.

`encode` serializes one example, `decode` parses records in a TensorFlow graph (a whole batch costs
little more than one record), and `find_problem` checks a record without a graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from pipelines.errors import DataError
from pipelines.format.feature import Feature, image_format


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
    """Decodes one image, or a batch of images of the same size."""

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
            f"feature {feature.name!r}: images of different sizes, {feature.shape}, cannot form a "
            "batch; decode and resize one record at a time (map_fn), or pack with --image-size"
        )
    return tf.map_fn(
        decode_one, encoded, fn_output_signature=tf.TensorSpec(feature.shape, feature.dtype)
    )


def encode(example: Mapping[str, object], features: Sequence[Feature]) -> bytes:
    """Serializes one example.

    Args:
        example: A value for each feature name: something that NumPy converts to an array of
            exactly the feature's shape and whose values fit its dtype; `str` or `bytes` for a
            string; the bytes of an image file for an image.
        features: All features of the record.

    Returns:
        The serialized `tf.train.Example`.

    Raises:
        DataError: A feature is missing, unknown or has another shape, or a value would not be
            stored exactly.
    """
    names = [feature.name for feature in features]
    if set(example) != set(names):
        raise DataError(
            f"expected the features {sorted(names)}, got {sorted(example)}; every example must "
            "have exactly the declared features"
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
    actual = f"bytes that begin with {value[:8]!r}" if isinstance(value, bytes) else type(value)
    raise DataError(
        f"feature {feature.name!r}: expected the bytes of a {feature.encoding} file, got {actual}"
    )


def _checked_strings(value: object, feature: Feature) -> list[bytes]:
    """Returns the strings in array order. NumPy's own string arrays would cut trailing zeros."""
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
    # Names of files may contain bytes that are not UTF-8.
    return [
        e.encode("utf-8", "surrogateescape") if isinstance(e, str) else e for e in array.ravel()
    ]


def _checked_numbers(value: object, feature: Feature) -> np.ndarray:
    """Converts a value to the feature's dtype, or raises if that would change it."""
    array = np.asarray(value)
    if not _same_shape(array.shape, feature) or array.dtype.kind not in "biuf":
        raise DataError(
            f"feature {feature.name!r}: expected {feature.dtype} of shape {feature.shape}, got "
            f"{array.dtype} of shape {array.shape}; convert the value or change the declaration"
        )
    with np.errstate(all="ignore"):  # the comparison below detects overflow
        cast = array.astype(feature.dtype)
    if cast.dtype != array.dtype and not np.array_equal(cast, array, equal_nan=True):
        raise DataError(
            f"feature {feature.name!r}: {feature.dtype} cannot hold every value of this "
            f"{array.dtype} array; convert it yourself or declare {array.dtype}"
        )
    return cast


def _same_shape(shape: tuple[int, ...], feature: Feature) -> bool:
    if feature.is_ragged and shape == (0,):  # an empty list has lost its inner dimensions
        return True
    return len(shape) == len(feature.shape) and all(
        dim in (None, actual) for dim, actual in zip(feature.shape, shape, strict=True)
    )


_FIELDS: dict[tf.DType, str] = {
    tf.string: "bytes_list",
    tf.float32: "float_list",
    tf.int64: "int64_list",
}


def parse_message(data: bytes, name: str) -> Any:
    """Parses a record as a `tf.train.Example` message.

    Args:
        data: The record's bytes.
        name: The record's name in the error message.

    Raises:
        DataError: The record is not a `tf.train.Example`.
    """
    try:
        return tf.train.Example.FromString(data)
    except DecodeError:
        raise DataError(f"{name}: not a tf.train.Example; no other format is supported") from None


def find_problem(example: Any, features: Sequence[Feature]) -> str | None:
    """Returns the first mismatch between a `tf.train.Example` and its features, or None."""
    for feature in features:
        if problem := _problem(example.features.feature, feature):
            return f"feature {feature.name!r}: {problem}"
    return None


def _problem(stored: Any, feature: Feature) -> str | None:
    if feature.name not in stored:
        return None if feature.is_ragged else "missing"
    kind = stored[feature.name].WhichOneof("kind")
    values: Any = getattr(stored[feature.name], kind).value if kind else ()
    expected_kind = _FIELDS[stored_dtype(feature)]
    if len(values) and kind != expected_kind:
        return f"expected {expected_kind}, found {kind}"
    dims = feature.shape if feature.encoding in ("list", "bytes") else ()
    row = math.prod(dim for dim in dims if dim is not None)
    if feature.is_ragged and len(values) % max(row, 1):
        return f"expected rows of {row} values, found {len(values)} values"
    if not feature.is_ragged and len(values) != row:
        return f"expected {row} values, found {len(values)}"
    if feature.encoding == "list":
        return _check_number(values, feature)
    return _check_bytes(values[0], feature) if feature.encoding != "bytes" else None


def _check_bytes(value: bytes, feature: Feature) -> str | None:
    if feature.is_image:
        found = image_format(value)
        return None if found == feature.encoding else f"not the bytes of a {feature.encoding} file"
    size = math.prod(dim for dim in feature.shape if dim is not None)
    expected = size * np.dtype(feature.dtype).itemsize
    return None if len(value) == expected else f"expected {expected} bytes, found {len(value)}"


def _check_number(values: Any, feature: Feature) -> str | None:
    if feature.label_names and not feature.shape:
        # tensorflow-datasets uses -1 for examples without a label.
        low, high, what = -1.0, len(feature.label_names) - 1.0, "label"
    elif feature.dtype == "bool":
        low, high, what = 0.0, 1.0, "bool"
    elif feature.dtype in ("int64", "float32"):
        return None  # the record itself stores these dtypes
    elif feature.dtype == "float16":
        high, what = float(np.finfo(feature.dtype).max), feature.dtype
        low = -high
    else:
        low, high = float(np.iinfo(feature.dtype).min), float(np.iinfo(feature.dtype).max)
        what = feature.dtype
    for value in values:
        if math.isfinite(value) and not low <= value <= high:
            return f"expected a {what} from {low:g} to {high:g}, found {value}"
    return None
