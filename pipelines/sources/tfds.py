"""Data sets of tensorflow-datasets: `tfds:NAME` or `tfds:NAME/CONFIG`.

With `--data-dir` the data set must be prepared in that folder; otherwise it is downloaded and
prepared if necessary. `--split` also takes slices, such as `train[:10%]`.

Features, splits and records are read by tensorflow-datasets itself, and images stay encoded.
Records of TFRecord files are found by their offsets, so that shards can be packed in parallel and
in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.format.feature import Feature, image_format
from pipelines.sources.source import Example, Options, Source, files_below, fingerprint

OPTIONS = frozenset({"split", "data_dir"})


def fits(location: str) -> bool:
    """Returns whether the location is a data set of tensorflow-datasets."""
    return location.startswith("tfds:")


class TfdsSource(Source):
    """One split. Nested features have names with slashes, such as `attributes/Smiling`."""

    def __init__(self, name: str, data_dir: str | None, split: str) -> None:
        self._name, self._data_dir, self._split = name, data_dir, split
        builder = _prepared(name, data_dir)
        self._records = _open(builder, split)
        self._length = len(self._records)
        if self._length == 0:  # the first example determines the encoding of images
            raise DataError(f"tfds:{name}: split {split!r} is empty")
        first, leaves = _flat_example(self._records[0]), _leaves(self._records.features)
        self.features = tuple(_feature(name, leaf, first[name]) for name, leaf in leaves)
        prepared = Path(builder.data_dir)
        mark = fingerprint(files_below(prepared), prepared)
        self.description = f"tfds {self._records.full_name}, {split}, {len(self)} examples {mark}"

    def __len__(self) -> int:
        return self._length

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        for number in numbers:
            yield _flat_example(self._records[number])

    @functools.cached_property
    def _records(self) -> Any:
        return _open(_builder(self._name, self._data_dir), self._split)


class _ByOffset:
    def __init__(self, info: Any, split: str, decoders: Any) -> None:
        self.features, self.full_name = info.features, info.full_name
        self._decoders = decoders
        self._files: list[Path] = []
        places = [np.empty((0, 2), np.int64)]
        try:
            of_split = info.splits[split]
        except (KeyError, ValueError):
            raise DataError(
                f"--split: expected one of {sorted(info.splits)} or a slice of one, got {split!r}"
            ) from None
        for of_file in of_split.file_instructions:
            offsets = np.fromiter(record_file.offsets(Path(of_file.filename)), np.int64)
            stop = None if of_file.take < 0 else of_file.skip + of_file.take
            offsets = offsets[of_file.skip : stop]
            places.append(np.stack([np.full_like(offsets, len(self._files)), offsets], axis=1))
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
    """The records of a split in another format, which tensorflow-datasets reads by number."""

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
        DataError: tensorflow-datasets is not installed, or the data set or split does not exist.
    """
    return TfdsSource(location.removeprefix("tfds:"), options.data_dir, options.split or "train")


def _open(builder: Any, split: str) -> _ByOffset | _DataSource:
    decoders = _keep_images_encoded(builder.info.features)
    if builder.info.splits and builder.info.file_format.value == "tfrecord":
        return _ByOffset(builder.info, split, decoders)
    return _DataSource(builder, split, decoders)


def _builder(name: str, data_dir: str | None) -> Any:
    try:
        import tensorflow_datasets as tfds
    except ImportError:
        raise DataError(
            "tfds: requires: pip install tensorflow-datasets importlib-resources"
        ) from None
    try:
        return tfds.builder(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        where = f" or in {data_dir}" if data_dir else "; pass its folder with --data-dir"
        raise DataError(
            f"tfds:{name}: no data set of this name in tensorflow-datasets{where}"
        ) from None


def _prepared(name: str, data_dir: str | None) -> Any:
    """Returns the builder of a prepared data set; downloads it unless `data_dir` is given."""
    builder = _builder(name, data_dir)
    if data_dir and not builder.is_prepared():
        raise DataError(
            f"tfds:{name}: not prepared in {builder.data_dir}; prepare it there with "
            "tensorflow-datasets, or omit --data-dir to download it"
        )
    try:
        builder.download_and_prepare()
    except Exception as error:  # builders raise anything: errors of networks, web pages, parsers
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"tfds:{name}: not prepared in {builder.data_dir}, and preparing it failed: {reason[0]}"
        ) from None
    return builder


def _keep_images_encoded(features: Any) -> dict[str, Any]:
    from tensorflow_datasets import decode

    decoders: dict[str, Any] = {}
    for name, feature in features.items():
        if _is_dict(feature):
            decoders[name] = _keep_images_encoded(feature)
        elif _is_kept_image(feature):
            decoders[name] = decode.SkipDecoding()
    return decoders


def _flat_example(example: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Returns an example with the names of nested features joined by slashes."""
    flat: dict[str, object] = {}
    for name, value in example.items():
        if isinstance(value, Mapping):
            flat |= _flat_example(value, f"{prefix}{name}/")
        else:
            is_text = isinstance(value, np.ndarray) and value.dtype.kind in "OSU"
            flat[prefix + name] = value.tolist() if is_text else value
    return flat


def _leaves(features: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, feature in features.items():
        if _is_dict(feature):
            yield from _leaves(feature, f"{prefix}{name}/")
        else:
            # A sequence of dictionaries is stored as a dictionary of arrays.
            info = feature.get_tensor_info()
            if isinstance(info, Mapping):
                yield from _flat_example(info, f"{prefix}{name}/").items()
            else:
                yield prefix + name, feature


def _feature(name: str, feature: Any, value: object) -> Feature:
    if _is_kept_image(feature):
        return _image(name, feature, value)
    shape, dtype = tuple(feature.shape), np.dtype(feature.np_dtype).name
    if dtype in ("object", "str", "bytes"):
        dtype, encoding = "string", "bytes"
    else:
        # Other readers understand lists, but for large arrays raw bytes are cheaper, and lists
        # cannot store float64.
        listed = None in shape or (not shape and dtype != "float64")
        encoding = "list" if listed else "raw"
    names = getattr(feature, "names", None) or ()
    try:
        return Feature.model_validate(
            {
                "name": name,
                "dtype": dtype,
                "shape": shape,
                "encoding": encoding,
                "label_names": tuple(names),
            }
        )
    except ValueError:
        raise DataError(
            f"feature {name!r}: cannot store {dtype} of shape {shape} in a record: only the first "
            "dimension and the size of single images may differ"
        ) from None


def _image(name: str, feature: Any, value: object) -> Feature:
    height, width, channels = feature.shape
    return Feature.model_validate(
        {
            "name": name,
            "dtype": np.dtype(feature.np_dtype).name,
            "shape": (height, width, channels or 3),
            "encoding": image_format(value) if isinstance(value, bytes) else None,
        }
    )


def _is_dict(feature: Any) -> bool:
    from tensorflow_datasets import features

    return isinstance(feature, features.FeaturesDict)


def _is_kept_image(feature: Any) -> bool:
    """Returns whether a feature is a single integer image. Float images store bit patterns."""
    from tensorflow_datasets import features

    return isinstance(feature, features.Image) and np.dtype(feature.np_dtype).kind == "u"
