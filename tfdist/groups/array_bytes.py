"""Converts arrays to bytes and back, bitwise identical, to send them to other processes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_STRING = "string"


def packed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Serializes arrays: a header with dtypes and shapes, and then the data. Empty without arrays.

    Args:
        arrays: Arrays of numbers of any of TensorFlow's dtypes, or of `bytes` objects.

    Returns:
        A uint8 vector.
    """
    if not arrays:
        return np.empty(0, np.uint8)
    bodies = [_body(array) for array in arrays]
    specs = [
        [_dtype(array), array.shape, body.size] for array, body in zip(arrays, bodies, strict=True)
    ]
    header = np.frombuffer(json.dumps(specs).encode(), np.uint8)
    return np.concatenate([np.array([header.size]).view(np.uint8), header, *bodies])


def unpacked(data: np.ndarray) -> list[np.ndarray]:
    """Deserializes the arrays from the result of `packed`."""
    if not data.size:
        return []
    begin = 8 + int(data[:8].view(np.int64)[0])
    specs = json.loads(data[8:begin].tobytes())
    ends = list(itertools.accumulate((size for *_, size in specs), initial=begin))
    return [
        _array(data[begin:end], dtype, shape)
        for (dtype, shape, _), begin, end in zip(specs, ends[:-1], ends[1:], strict=True)
    ]


def _dtype(array: np.ndarray) -> str:
    return _STRING if array.dtype == object else tf.as_dtype(array.dtype).name


def _body(array: np.ndarray) -> np.ndarray:
    """Returns the bytes of the elements; for strings, their lengths followed by the strings."""
    if array.dtype != object:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    strings = array.reshape(-1).tolist()
    lengths = np.array([len(string) for string in strings], np.int64)
    return np.concatenate([lengths.view(np.uint8), np.frombuffer(b"".join(strings), np.uint8)])


def _array(body: np.ndarray, dtype: str, shape: Sequence[int]) -> np.ndarray:
    if dtype != _STRING:
        return body.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
    size = int(np.prod(shape)) * 8
    ends = np.cumsum(body[:size].view(np.int64)).tolist()
    text = body[size:].tobytes()
    strings = np.empty(len(ends), object)
    strings[:] = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return strings.reshape(shape)
