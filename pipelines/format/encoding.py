"""Conversion of named arrays to serialized `tf.train.Example` records, without TensorFlow.

Importing TensorFlow takes longer than to encode thousands of records. `encode` serializes one
example, and `find_problem` checks a record.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from pipelines.errors import DataError
from pipelines.format.feature import Feature, image_format

#: Messages of tensorflow/core/example: the name of each field, its number, and its type.
_MESSAGES = {
    "BytesList": [("value", 1, "TYPE_BYTES")],
    "FloatList": [("value", 1, "TYPE_FLOAT")],
    "Int64List": [("value", 1, "TYPE_INT64")],
    "Feature": [
        ("bytes_list", 1, "BytesList"),
        ("float_list", 2, "FloatList"),
        ("int64_list", 3, "Int64List"),
    ],
    "Features": [("feature", 1, "Features.FeatureEntry")],
    "Example": [("features", 1, "Features")],
}


@functools.cache
def _message(name: str) -> Any:
    """Returns the class of a message, from a pool of its own: TensorFlow adds its own classes."""
    file = descriptor_pb2.FileDescriptorProto(name="example", package="tensorflow", syntax="proto3")
    for message, fields in _MESSAGES.items():
        target = file.message_type.add(name=message)
        if message == "Features":  # a map is a list of pairs
            entry = target.nested_type.add(name="FeatureEntry")
            entry.options.map_entry = True
            _add_field(entry, "key", 1, "TYPE_STRING")
            _add_field(entry, "value", 2, "Feature")
        if message == "Feature":
            target.oneof_decl.add(name="kind")
        for field, number, kind in fields:
            added = _add_field(target, field, number, kind)
            if message == "Feature":
                added.oneof_index = 0
            elif message != "Example":
                added.label = added.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tensorflow.{name}"))


def _add_field(message: Any, name: str, number: int, kind: str) -> Any:
    field = message.field.add(name=name, number=number, label="LABEL_OPTIONAL")
    if kind.startswith("TYPE_"):
        field.type = descriptor_pb2.FieldDescriptorProto.Type.Value(kind)
    else:
        field.type, field.type_name = field.TYPE_MESSAGE, f".tensorflow.{kind}"
    return field


def _stored_kind(feature: Feature) -> str:
    if feature.encoding != "list":
        return "bytes_list"
    return "float_list" if feature.dtype.startswith("float") else "int64_list"


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
    if len(example) != len(features) or any(feature.name not in example for feature in features):
        names = sorted(feature.name for feature in features)
        raise DataError(
            f"expected the features {names}, got {sorted(example)}; every example must have "
            "exactly the declared features"
        )
    message = _message("Example")()
    for feature in features:
        stored = message.features.feature[feature.name]
        # The field is set even if it has no values.
        values = getattr(stored, _stored_kind(feature))
        values.SetInParent()
        values.value.extend(_values(example[feature.name], feature))
    return bytes(message.SerializeToString(deterministic=True))


#: Types of scalars that need neither a check nor a conversion, by dtype.
_EXACT = {"int64": int, "float64": float, "string": bytes}


def _values(value: object, feature: Feature) -> Sequence[Any] | np.ndarray:
    is_exact = not feature.shape and type(value) is _EXACT.get(feature.dtype)
    if is_exact and not (isinstance(value, int) and value.bit_length() > 63):
        if feature.encoding != "raw":
            return [value]
        if feature.dtype == "float64":
            return [struct.pack("<d", value)]
    if feature.is_image:
        if isinstance(value, bytes) and image_format(value) == feature.encoding:
            return [value]
        given = f"bytes that begin with {value[:8]!r}" if isinstance(value, bytes) else type(value)
        expected = f"expected the bytes of a {feature.encoding} file"
        raise DataError(f"feature {feature.name!r}: {expected}, got {given}")
    if feature.dtype == "string":
        return _checked_strings(value, feature)
    array = _checked_numbers(value, feature)
    if feature.encoding == "raw":
        return [array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()]
    is_float = _stored_kind(feature) == "float_list"
    return array.ravel().astype(np.float32 if is_float else np.int64)


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


def parse_message(data: bytes, name: str) -> Any:
    """Parses a record as a `tf.train.Example` message.

    Raises:
        DataError: The record is not a `tf.train.Example`.
    """
    try:
        example = _message("Example").FromString(data)
    except DecodeError:
        raise DataError(f"{name}: not a tf.train.Example; no other format is supported") from None
    if fields := {field.field_number for field in UnknownFieldSet(example)}:
        what = "a tf.train.SequenceExample" if fields == {2} else "another message"
        raise DataError(
            f"{name}: {what}, not a tf.train.Example; no other format is supported: write its "
            "feature lists as features of an Example, or read it with tf.data"
        )
    return example


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
    expected_kind = _stored_kind(feature)
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
    if feature.encoding == "bytes":
        return None
    (value,) = values
    if feature.is_image:
        actual = image_format(value)
        return None if actual == feature.encoding else f"not the bytes of a {feature.encoding} file"
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
