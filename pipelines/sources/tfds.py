"""A data set of tensorflow-datasets: `tfds:NAME` or `tfds:NAME/CONFIG`.

With `--data-dir` it has to be prepared there; without, it is downloaded and prepared if need be.

Features, splits and records are read with tensorflow-datasets itself; images stay the encoded files
that it stores. Records of its TFRecord files are found by their offsets, so that shards can be
packed in parallel and in any order. `--split` takes its slices too, say `train[:10%]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.sources import tfds_features
from pipelines.sources.source import Example, Options, Source, files_below, fingerprint

OPTIONS = frozenset({"split", "data_dir"})


def fits(location: str) -> bool:
    """Whether the location names a data set of tensorflow-datasets."""
    return location.startswith("tfds:")


class TfdsSource(Source):
    """One split; features inside others are named with slashes, as `attributes/Smiling`."""

    def __init__(self, name: str, data_dir: str | None, split: str) -> None:
        self._name, self._data_dir, self._split = name, data_dir, split
        builder = _prepared(name, data_dir)
        self._records: Any = _open(builder, split)
        self._length = len(self._records)
        if self._length == 0:  # the first tells how images are encoded
            raise DataError(f"tfds:{name}: split {split!r} is empty")
        self.features = tfds_features.flat_features(
            self._records.features, tfds_features.flat_example(self._records[0])
        )
        prepared = Path(builder.data_dir)
        mark = fingerprint(files_below(prepared), prepared)
        self.description = f"tfds {self._records.full_name}, {split}, {len(self)} examples {mark}"

    def __len__(self) -> int:
        return self._length

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        if self._records is None:
            self._records = _open(_builder(self._name, self._data_dir), self._split)
        for number in numbers:
            yield tfds_features.flat_example(self._records[number])

    def __getstate__(self) -> dict[str, object]:
        """Every worker process makes its own builder."""
        return self.__dict__ | {"_records": None}


class _ByOffset:
    """The records of a split in TFRecord files, by their number."""

    def __init__(self, info: Any, split: str, decoders: Any) -> None:
        self.features, self.full_name = info.features, info.full_name
        self._decoders = decoders
        self._files: list[Path] = []
        places = [np.empty((0, 2), np.int64)]
        for of_file in _split_info(info, split).file_instructions:
            found = np.fromiter(record_file.offsets(Path(of_file.filename)), np.int64)
            stop = None if of_file.take < 0 else of_file.skip + of_file.take
            found = found[of_file.skip : stop]
            places.append(np.stack([np.full_like(found, len(self._files)), found], axis=1))
            self._files.append(Path(of_file.filename))
        self._places = np.concatenate(places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Any:
        file, offset = self._places[number]
        with self._files[file].open("rb") as opened:
            record = record_file.read_at(opened, int(offset))
        return self.features.deserialize_example_np(record, decoders=self._decoders)


class _DataSource:
    """The records of a split in any other format, which tensorflow-datasets reads by number."""

    def __init__(self, builder: Any, split: str, decoders: Any) -> None:
        self.features, self.full_name = builder.info.features, builder.info.full_name
        self._records = builder.as_data_source(split=split, decoders=decoders)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, number: int) -> Any:
        return self._records[number]


def open_source(location: str, options: Options) -> Source:
    """Opens one split, `train` unless another is named.

    Raises:
        DataError: tensorflow-datasets is not installed, or it has no such data set or split.
    """
    return TfdsSource(location.removeprefix("tfds:"), options.data_dir, options.split or "train")


def _open(builder: Any, split: str) -> _ByOffset | _DataSource:
    decoders = tfds_features.keep_images_encoded(builder.info.features)
    if builder.info.splits and builder.info.file_format.value == "tfrecord":
        return _ByOffset(builder.info, split, decoders)
    return _DataSource(builder, split, decoders)


def _split_info(info: Any, split: str) -> Any:
    try:
        return info.splits[split]
    except (KeyError, ValueError):
        raise DataError(
            f"--split: expected one of {sorted(info.splits)} or a slice of one, got {split!r}"
        ) from None


def _builder(name: str, data_dir: str | None) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise DataError("tfds: needs tensorflow-datasets: pip install 'tfdist[tfds]'") from None
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        where = f" or in {data_dir}" if data_dir else "; name its folder with --data-dir"
        raise DataError(
            f"tfds:{name}: no data set of this name in tensorflow-datasets{where}"
        ) from None


def _prepared(name: str, data_dir: str | None) -> Any:
    """The builder of a data set that is on this disk; downloaded if no folder for it was named."""
    builder = _builder(name, data_dir)
    if data_dir and not builder.is_prepared():
        raise DataError(
            f"tfds:{name}: not prepared in {builder.data_dir}; prepare it there with "
            "tensorflow-datasets, or leave --data-dir out to have it downloaded"
        )
    try:
        builder.download_and_prepare()
    except Exception as error:  # of the network, of a web page, of a builder: any
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"tfds:{name}: not prepared in {builder.data_dir}, and preparing it failed: {reason[0]}"
        ) from None
    return builder
