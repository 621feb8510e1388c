"""A look at the records of a folder: their values in words, their labels and their images."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.format.decode import decode
from pipelines.format.feature import Feature
from pipelines.format.index import Index, Shard
from pipelines.show.contact_sheet import save_sheet

_MOST_CHARACTERS = 60


def records(directory: Path, index: Index, num_records: int) -> Iterator[bytes]:
    """Serialized records, as many from the beginning of each shard, shards taking turns.

    Raises:
        DataError: one of them is damaged.
    """

    def of(shard: Shard) -> Iterator[bytes]:
        path = directory / shard.name
        sound = record_file.sound_records(path, index.compression)
        yield from (record.data for record in itertools.islice(sound, per_shard))

    per_shard = -(-num_records // max(index.num_shards, 1))
    turns = itertools.zip_longest(*map(of, index.shards))
    found = (data for turn in turns for data in turn if data is not None)
    return itertools.islice(found, num_records)


def in_words(record: bytes, index: Index) -> dict[str, str]:
    """The value of each feature of a record, cut short."""
    example = decode(tf.constant(record), index.features, decode_images=False)
    return {f.name: _words(example[f.name].numpy(), f) for f in index.features}


class LabelCounts:
    """How many records have each label.

    Attributes:
        num_records: counted so far.
    """

    def __init__(self, index: Index) -> None:
        self.num_records = 0
        self._features = [f for f in index.features if f.label_names and None not in f.shape]
        self._counts = {f.name: np.zeros(len(f.label_names), np.int64) for f in self._features}

    def add(self, serialized: Sequence[bytes]) -> None:
        """Counts records."""
        self.num_records += len(serialized)
        if not self._features:
            return
        batch = decode(tf.constant(serialized), self._features)
        for feature in self._features:
            values, counts = batch[feature.name].numpy(), self._counts[feature.name]
            if feature.shape:  # a vector of attributes, each there or not
                counts += (values != 0).sum(axis=0)
            else:
                known = values[(values >= 0) & (values < len(feature.label_names))]
                counts += np.bincount(known, minlength=len(feature.label_names))

    def by_feature(self) -> dict[str, dict[str, int]]:
        """The counts by feature and label, most frequent first."""
        return {
            f.name: {
                f.label_names[i]: int(self._counts[f.name][i])
                for i in np.argsort(-self._counts[f.name], kind="stable")
            }
            for f in self._features
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
