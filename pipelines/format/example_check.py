"""Single records as `tf.train.Example`, and what is wrong with one. Without TensorFlow's graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from pipelines.errors import DataError
from pipelines.format.decode import stored_dtype
from pipelines.format.feature import Feature, image_format

_FIELDS: dict[tf.DType, str] = {
    tf.string: "bytes_list",
    tf.float32: "float_list",
    tf.int64: "int64_list",
}


def parsed(data: bytes, name: str) -> Any:
    """The record's `tf.train.Example`.

    Args:
        data: of the record.
        name: of the record, for the error.

    Raises:
        DataError: it is none.
    """
    try:
        return tf.train.Example.FromString(data)
    except DecodeError:
        raise DataError(f"{name}: not a tf.train.Example, nothing else can be read here") from None


def problem_of(example: Any, features: Sequence[Feature]) -> str | None:
    """The first way in which a `tf.train.Example` does not hold the features, or None."""
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
        return _wrong_number(values, feature)
    return _wrong_bytes(values[0], feature) if feature.encoding != "bytes" else None


def _wrong_bytes(value: bytes, feature: Feature) -> str | None:
    if feature.is_image:
        found = image_format(value)
        return None if found == feature.encoding else f"not the bytes of a {feature.encoding} file"
    size = math.prod(dim for dim in feature.shape if dim is not None)
    expected = size * np.dtype(feature.dtype).itemsize
    return None if len(value) == expected else f"expected {expected} bytes, found {len(value)}"


def _wrong_number(values: Any, feature: Feature) -> str | None:
    if feature.label_names and not feature.shape:
        # tensorflow-datasets labels with -1 where there is no label.
        low, high, what = -1.0, len(feature.label_names) - 1.0, "label"
    elif feature.dtype == "bool":
        low, high, what = 0.0, 1.0, "bool"
    elif feature.dtype in ("int64", "float32"):
        return None  # what the record stores
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
