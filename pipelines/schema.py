"""What one record holds: named features, and their way into a `tf.train.Example` and back.

`decode` takes one serialized record or a whole batch of them; a batch costs little more than one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

import numpy as np
import tensorflow as tf
from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator

from pipelines.errors import DataError

DType = Literal[
    "bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"
]


class Feature(BaseModel):
    """One named array of a record.

    Attributes:
        name: the key in the record and in the dictionaries that reading yields.
        dtype: NumPy's name of the array's dtype, the same after reading.
        shape: the array's shape, every dim known; `()` for a scalar.
        encoding: `raw` stores the array's little-endian bytes, for images and other large arrays;
            `list` stores an Int64List or FloatList that other readers of TFRecords understand,
            for labels and short vectors.
        label_names: for a class label, the name of each class in order; otherwise empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: DType
    shape: tuple[NonNegativeInt, ...] = ()
    encoding: Literal["raw", "list"] = "raw"
    label_names: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _list_keeps_every_bit(self) -> Self:
        if self.encoding == "list" and self.dtype == "float64":
            raise ValueError(
                f"feature {self.name!r}: a FloatList holds float32, so encoding 'list' would round "
                "float64; use encoding 'raw' or dtype 'float32'"
            )
        return self

    @property
    def stored_dtype(self) -> tf.DType:
        """The dtype inside the record: string for bytes, int64 or float32 for a list."""
        if self.encoding == "raw":
            return tf.string
        return tf.float32 if self.dtype.startswith("float") else tf.int64


def encode(example: Mapping[str, object], features: Sequence[Feature]) -> bytes:
    """Serializes one example.

    Args:
        example: for each feature's name a value that NumPy takes as an array of exactly the
            feature's shape, and whose values its dtype can hold.
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
    stored = {f.name: _to_message(_checked(example[f.name], f), f) for f in features}
    message = tf.train.Example(features=tf.train.Features(feature=stored))
    return bytes(message.SerializeToString(deterministic=True))


def decode(serialized: tf.Tensor, features: Sequence[Feature]) -> dict[str, tf.Tensor]:
    """Parses serialized records into arrays.

    Args:
        serialized: string tensor of shape `()` or `(batch,)`.
        features: those wanted, of the record's.

    Returns:
        By name, each feature in its dtype, of its shape behind `serialized`'s.
    """
    stored = tf.io.parse_example(
        serialized,
        {
            f.name: tf.io.FixedLenFeature(() if f.encoding == "raw" else f.shape, f.stored_dtype)
            for f in features
        },
    )
    arrays = {}
    for feature in features:
        value = stored[feature.name]
        if feature.encoding == "raw":
            # The number of bytes is checked by this as well: a record of other size stops here.
            shape = tf.concat([tf.shape(value), tf.constant(feature.shape, tf.int32)], axis=0)
            value = tf.reshape(tf.io.decode_raw(value, feature.dtype), shape)
        arrays[feature.name] = tf.cast(value, feature.dtype)
    return arrays


def _checked(value: object, feature: Feature) -> np.ndarray:
    """The value as an array of the feature's dtype, refused where that would change it."""
    array = np.asarray(value)
    if array.shape != feature.shape or array.dtype.kind not in "biuf":
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


def _to_message(array: np.ndarray, feature: Feature) -> tf.train.Feature:
    if feature.encoding == "raw":
        little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[little_endian]))
    if feature.stored_dtype == tf.float32:
        return tf.train.Feature(
            float_list=tf.train.FloatList(value=array.ravel().astype(np.float32))
        )
    return tf.train.Feature(int64_list=tf.train.Int64List(value=array.ravel().astype(np.int64)))
