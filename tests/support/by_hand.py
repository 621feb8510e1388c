"""Writes TFRecord files with `tf.train.Example`, as users do without this project."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

Values = list[int] | list[float] | list[bytes]


def example(**features: Values) -> bytes:
    """Returns a serialized record. The type of a feature's first value selects its kind."""
    return tf.train.Example(
        features=tf.train.Features(
            feature={name: _feature(values) for name, values in features.items()}
        )
    ).SerializeToString()


def write(path: Path, records: list[bytes], compression: str = "") -> Path:
    """Writes records with TensorFlow, and returns the path."""
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)
    return path


def _feature(values: Values) -> tf.train.Feature:
    if values and isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if values and isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
