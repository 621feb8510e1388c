"""A look at the records of a folder: their values in words, their labels and their images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from pipelines import framing
from pipelines.contact_sheet import save_sheet
from pipelines.errors import DataError
from pipelines.feature import Feature
from pipelines.index import Index
from pipelines.schema import decode

_MOST_CHARACTERS = 60
_PARSED_AT_ONCE = 1000


def sample(directory: Path, index: Index, num_records: int) -> list[bytes]:
    """Serialized records, as many from the beginning of each shard, shards taking turns.

    Raises:
        DataError: one of them is damaged.
    """
    per_shard = -(-num_records // max(index.num_shards, 1))
    by_shard = []
    for shard in index.shards:
        path, found = directory / shard.name, []
        for record in itertools.islice(framing.records(path, index.compression), per_shard):
            if record.problem:
                raise DataError(f"{path}: record at byte {record.offset}: {record.problem}")
            found.append(record.data)
        by_shard.append(found)
    turns = itertools.zip_longest(*by_shard)
    return [data for turn in turns for data in turn if data is not None][:num_records]


def in_words(record: bytes, index: Index) -> dict[str, str]:
    """The value of each feature of a record, cut short."""
    example = decode(tf.constant(record), index.features, decode_images=False)
    return {f.name: _words(example[f.name].numpy(), f) for f in index.features}


def label_counts(records: Sequence[bytes], index: Index) -> dict[str, dict[str, int]]:
    """How many of the records have each label, by feature and label, most frequent first."""
    labels = [f for f in index.features if f.label_names and None not in f.shape]
    counts = {f.name: np.zeros(len(f.label_names), np.int64) for f in labels}
    for begin in range(0, len(records), _PARSED_AT_ONCE) if labels else ():
        batch = decode(tf.constant(records[begin : begin + _PARSED_AT_ONCE]), labels)
        for feature in labels:
            values = batch[feature.name].numpy()
            if feature.shape:  # a vector of attributes, each there or not
                counts[feature.name] += (values != 0).sum(axis=0)
            else:
                known = values[(values >= 0) & (values < len(feature.label_names))]
                counts[feature.name] += np.bincount(known, minlength=len(feature.label_names))
    return {
        f.name: {f.label_names[i]: int(counts[f.name][i]) for i in np.argsort(-counts[f.name])}
        for f in labels
    }


def contact_sheet(records: Sequence[bytes], index: Index, path: Path) -> int:
    """Saves the images of records as one PNG, with their labels.

    Returns:
        How many there are; with none, no file is written.

    Raises:
        DataError: an image cannot be decoded.
    """
    image = next((f for f in index.features if _can_be_shown(f)), None)
    label = next((f for f in index.features if f.label_names and not f.shape), None)
    if image is None or not records:
        return 0
    wanted = [image, label] if label else [image]
    images, captions = [], []
    for record in records:
        try:
            example = decode(tf.constant(record), wanted)
        except tf.errors.InvalidArgumentError as error:
            problem = str(error.message).partition("\n")[0]
            raise DataError(f"feature {image.name!r}: {problem}; see pipelines.verify") from None
        images.append(example[image.name].numpy())
        captions.append(_words(example[label.name].numpy(), label) if label else "")
    save_sheet(images, captions, path)
    return len(images)


def _can_be_shown(feature: Feature) -> bool:
    return feature.is_image or (
        feature.dtype == "uint8"
        and (len(feature.shape) == 2 or (len(feature.shape) == 3 and feature.shape[2] in (1, 3, 4)))
    )


def _words(value: object, feature: Feature) -> str:
    if feature.is_image and isinstance(value, bytes):
        return f"{feature.encoding}, {len(value):,} bytes"
    if feature.label_names and not feature.shape:
        number = int(np.asarray(value))
        known = 0 <= number < len(feature.label_names)
        return feature.label_names[number] if known else str(number)
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
    else:
        text = np.array2string(np.asarray(value), threshold=8, separator=", ").replace("\n", "")
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
