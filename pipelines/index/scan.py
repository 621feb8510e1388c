"""Creates the index of existing shards by reading every record once, in parallel.

A record stores for each feature whether it holds bytes, floats or integers, and how many. What it
does not store (that bytes are an array, that numbers are pixels) is read from the `features.json`
and `*.labels.txt` files of tensorflow-datasets, or has to be declared.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from PIL import Image
from pydantic import ValidationError

from pipelines import storage
from pipelines.console import parallel_tasks
from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.format.encoding import parse_message
from pipelines.format.feature import Encoding, Feature, image_format
from pipelines.format.index import Index, Shard, sha256_of
from pipelines.format.record_file import Compression
from pipelines.sources.account import Account
from pipelines.sources.images import DAMAGE
from pipelines.storage import AnyPath, RemotePath

_OF_SHARDS = re.compile(r"(\d+)-of-(\d+)")
_NUM_BETWEEN_REPORTS = 100


class _File(NamedTuple):
    path: AnyPath
    name: str
    compression: Compression


@dataclass
class _Contents:
    """The result of scanning one file.

    Attributes:
        shard: Description of the file.
        offsets: Offset of each record in the uncompressed file.
        seen: Statistics of each feature.
        account: What is not as in other records.
    """

    shard: Shard
    offsets: np.ndarray
    seen: dict[str, FeatureStatistics]
    account: Account


def make_index(
    files: Sequence[AnyPath],
    directory: AnyPath,
    declared: Sequence[Feature],
    num_workers: int,
    account: Account,
) -> tuple[Index, np.ndarray]:
    """Scans shards and returns their index and the offsets of their records.

    Returns:
        The index, and the offset of each record in its uncompressed file, shard by shard. Nothing
        is written yet.

    Raises:
        DataError: A file or record is damaged or is not a TFRecord or `tf.train.Example`, shards
            are missing or belong to different data sets, or a declared feature does not exist.
    """
    _check_complete(files)
    filled = [file for file in files if storage.num_bytes(file)]
    compressions = {*storage.in_order(record_file.compression_of, filled, directory)}
    if len(compressions) > 1:
        raise DataError(
            f"{files[0].parent}: the files have different compressions; select files with --files"
        )
    compression: Compression = next(filter(None, compressions), "")
    tasks = [_File(path, _name(path, directory), compression) for path in files]
    contents = parallel_tasks.run(
        _scan_file,
        tasks,
        num_workers=num_workers,
        description=f"reading {len(tasks)} files",
        num_records=None,
    )
    shards = tuple(content.shard for content in contents)
    account.use("examples", sum(shard.num_records for shard in shards))
    for content in contents:
        account.merge(content.account)
    digest = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()[:16]
    index = Index(
        source=f"TFRecord files {digest}",
        features=_features(contents, files[0].parent, declared, account),
        compression=compression,
        shards=shards,
    )
    return index, np.concatenate([content.offsets for content in contents])


def link_shards(index: Index, files: Sequence[AnyPath], directory: AnyPath) -> None:
    """Creates symbolic links in the folder of an index to shards outside of it.

    An index may list only files of its own folder, for security. A bucket has no links: there, the
    shards are copied within the bucket.

    Raises:
        DataError: A file with the name of the link exists already.
    """
    for shard, path in zip(index.shards, files, strict=True):
        if isinstance(path, RemotePath) or isinstance(directory, RemotePath):
            copy = cast(RemotePath, directory / shard.name)
            if path != copy:
                cast(RemotePath, path).copy_to(copy)
            continue
        link = directory / shard.name
        if link.exists() and link.samefile(path):
            continue
        try:
            link.symlink_to(os.path.relpath(path.resolve(), directory.resolve()))
        except FileExistsError:
            raise DataError(f"{link}: exists already; choose another folder with --to") from None


def _name(path: AnyPath, directory: AnyPath) -> str:
    """Returns the name of a shard in an index: its path in the folder, or that of a link there."""
    if isinstance(path, RemotePath) or isinstance(directory, RemotePath):
        return path.name
    path, directory = path.resolve(), directory.resolve()
    return str(path.relative_to(directory)) if path.is_relative_to(directory) else path.name


def _check_complete(files: Sequence[AnyPath]) -> None:
    """Checks by the file names that the shards are complete and belong to one data set."""
    sets = defaultdict(list)
    for path in files:
        sets[re.sub(r"\d+", "*", path.name)].append(path)
    if len(sets) > 1:
        raise DataError(
            f"{files[0].parent}: expected the shards of one data set, found {', '.join(sets)}; "
            "select one with --files, and a folder for its index with --to"
        )
    for path in files:
        if (match := _OF_SHARDS.search(path.name)) and int(match[2]) != len(files):
            raise DataError(
                f"{path}: expected {int(match[2])} shards by its name, found {len(files)}; get the "
                "missing shards, or select files with --files"
            )


def _scan_file(file: _File, advance: parallel_tasks.Advance) -> _Contents:
    offsets, account = list[int](), Account()
    seen: dict[str, FeatureStatistics] = {}
    for record in record_file.intact_records(file.path, file.compression):
        example = parse_message(record.data, f"{file.path}: record at byte {record.offset}")
        for name in add_example(seen, example):
            change = f"have a damaged image as {name!r}"
            account.change("examples", change, f"{file.name}: record {len(offsets)}", guessed=True)
        offsets.append(record.offset)
        if len(offsets) % _NUM_BETWEEN_REPORTS == 0:
            advance(_NUM_BETWEEN_REPORTS)
    advance(len(offsets) % _NUM_BETWEEN_REPORTS)
    shard = Shard(
        name=file.name,
        num_records=len(offsets),
        num_bytes=storage.num_bytes(file.path),
        sha256=sha256_of(file.path),
    )
    return _Contents(shard, np.array(offsets, np.int64), seen, account)


def _features(
    contents: Sequence[_Contents], folder: AnyPath, declared: Sequence[Feature], account: Account
) -> tuple[Feature, ...]:
    seen: dict[str, FeatureStatistics] = {}
    for content in contents:
        merge(seen, content.seen)
        for name, of_feature in seen.items():
            if len(of_feature.kinds) > 1:
                kinds = " and ".join(sorted(of_feature.kinds))
                raise DataError(
                    f"{content.shard.name}: feature {name!r} is {kinds} in different records; a "
                    "feature must have the same type in all records"
                )
    num_records = sum(content.shard.num_records for content in contents)
    features = {name: seen[name].feature(name, num_records) for name in sorted(seen)}
    features = refine_with_tfds_metadata(features, folder)
    for feature in declared:
        if feature.name not in features:
            raise DataError(
                f"--features: no record has {feature.name!r}; the records have {list(features)}"
            )
        features[feature.name] = feature
    for name, feature in features.items():
        others = {f or "no image" for f in seen[name].formats}
        if feature.encoding == "bytes" and len(others) > 1:
            what = f"stored as bytes, because they are {' and '.join(sorted(others))}"
            account.change("features", what, name, guessed=True)
    return tuple(features.values())


_DTYPES = {"bytes_list": "string", "float_list": "float32", "int64_list": "int64"}
#: Channels by Pillow's image mode. All other modes are decoded to three channels.
_CHANNELS = {"1": 1, "L": 1, "I": 1, "I;16": 1, "RGBA": 4}

_ORIENTATION = 0x0112  # of EXIF
_BITS_OF_PNG = 24  # position in the file, https://www.w3.org/TR/png/#11IHDR


@dataclass
class FeatureStatistics:
    """Statistics of one feature over the records seen so far.

    Attributes:
        kinds: Its fields in `tf.train.Feature`, over records with at least one value.
        lengths: The smallest and largest number of values in a record.
        num_records: Number of records that have the feature.
        formats: Image formats of its bytes, None for bytes that are not an image.
        channels: The largest number of channels of its images.
        bits: The largest number of bits per channel of its images.
        sizes: At most two (height, width) pairs of its upright images: two are enough to know they
            differ.
    """

    kinds: set[str] = field(default_factory=set)
    lengths: tuple[int, int] | None = None
    num_records: int = 0
    formats: set[Encoding | None] = field(default_factory=set)
    channels: int = 0
    bits: int = 8
    sizes: set[tuple[int, int]] = field(default_factory=set)

    def add(self, feature: Any) -> bool:
        """Adds one `tf.train.Feature`, and returns whether it has an image that is damaged."""
        kind = feature.WhichOneof("kind")
        values = getattr(feature, kind).value if kind else ()
        self.num_records += 1
        self._add_length(len(values), len(values))
        if values:
            self.kinds.add(kind)
        if kind != "bytes_list":
            return False
        are_intact = [self._add_bytes(value) for value in values]
        return not all(are_intact)

    def merge(self, other: FeatureStatistics) -> None:
        """Adds the statistics of other records."""
        self.kinds |= other.kinds
        self.num_records += other.num_records
        self.formats |= other.formats
        self.channels = max(self.channels, other.channels)
        self.bits = max(self.bits, other.bits)
        self.sizes |= other.sizes
        if other.lengths:
            self._add_length(*other.lengths)

    def feature(self, name: str, num_records: int) -> Feature:
        """Returns the inferred feature; where it is absent from a record, it has no values."""
        low, high = self.lengths or (0, 0)
        if self.num_records < num_records:
            low = 0
        shape: tuple[int | None, ...] = (low,) if low == high else (None,)
        shape = () if shape == (1,) else shape
        formats = {f for f in self.formats if f}
        if shape == () and len(formats) == 1 and self.formats == formats and self.channels:
            height, width = next(iter(self.sizes)) if len(self.sizes) == 1 else (None, None)
            return Feature(
                name=name,
                dtype="uint16" if self.bits == 16 else "uint8",
                shape=(height, width, self.channels),
                encoding=formats.pop(),
            )
        # Without a value in any record the type is unknown, and any kind of list reads it.
        dtype = _DTYPES[next(iter(self.kinds), "int64_list")]
        encoding = "bytes" if dtype == "string" else "list"
        return Feature.model_validate(
            {"name": name, "dtype": dtype, "shape": shape, "encoding": encoding}
        )

    def _add_length(self, low: int, high: int) -> None:
        if self.lengths:
            low, high = min(low, self.lengths[0]), max(high, self.lengths[1])
        self.lengths = (low, high)

    def _add_bytes(self, value: bytes) -> bool:
        """Adds a value, and returns whether it is intact as far as its first bytes tell."""
        encoding = image_format(value)
        self.formats.add(encoding)
        if encoding is None:
            return True
        try:
            with Image.open(io.BytesIO(value)) as image:
                width, height = image.size
                channels = _CHANNELS.get(image.mode, 3)
                if image.getexif().get(_ORIENTATION, 1) in range(5, 9):
                    width, height = height, width
        except DAMAGE:
            return False
        channels = 3 if (channels, encoding) == (4, "jpeg") else channels
        self.channels = max(self.channels, channels)
        self.bits = max(self.bits, value[_BITS_OF_PNG] if encoding == "png" else 8)
        if len(self.sizes) < 2:
            self.sizes.add((height, width))
        return True


def add_example(seen: dict[str, FeatureStatistics], example: Any) -> list[str]:
    """Adds every feature of a `tf.train.Example`, and returns those with a damaged image."""
    pairs = sorted(example.features.feature.items())
    return [name for name, f in pairs if seen.setdefault(name, FeatureStatistics()).add(f)]


def merge(seen: dict[str, FeatureStatistics], other: Mapping[str, FeatureStatistics]) -> None:
    """Adds the statistics of other records."""
    for name, of_feature in other.items():
        seen.setdefault(name, FeatureStatistics()).merge(of_feature)


_FEATURES = "features.json"
_Shape = tuple[int | None, ...]


def refine_with_tfds_metadata(
    features: Mapping[str, Feature], folder: AnyPath
) -> dict[str, Feature]:
    """Refines inferred features by `features.json`, where the records agree with it.

    Raises:
        DataError: `features.json` is not valid.
    """
    path = folder / _FEATURES
    if not path.is_file():
        return dict(features)
    try:
        declared = dict(_declared_fields(json.loads(path.read_bytes()), "", ()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not the features of tensorflow-datasets: {error!r}") from None
    refined = {}
    for name, feature in features.items():
        labels = folder / f"{name.replace('/', '-')}.labels.txt"
        fields = declared.get(name, {})
        if "label_names" in fields and labels.is_file():
            fields["label_names"] = tuple(labels.read_bytes().decode().splitlines())
        refined[name] = _refined(feature, fields)
    return refined


def _refined(feature: Feature, fields: Mapping[str, object]) -> Feature:
    fields = dict(fields)
    if feature.is_image:
        fields = {key: value for key, value in fields.items() if key == "shape"}
        shape = fields.get("shape")
        if not isinstance(shape, tuple) or len(shape) != 3 or shape[2] is None:
            return feature
    if feature.encoding == "list" and fields.get("dtype") == "float64":
        fields["dtype"] = "float32"  # a FloatList stores no more
    try:
        return Feature.model_validate(feature.model_dump() | fields)
    except ValidationError:
        return feature


def _declared_fields(
    node: Mapping[str, Any], prefix: str, shape: _Shape
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the declared fields of each feature by its name in the record.

    `shape` is the shape of the enclosing sequences. The kinds are those of `feature.proto` of
    tensorflow-datasets; unknown kinds are left out, so that their inferred features remain.
    """
    if "featuresDict" in node:
        for name, inner in node["featuresDict"]["features"].items():
            yield from _declared_fields(inner, f"{prefix}{name}/", shape)
        return
    name = prefix.removesuffix("/")
    if "sequence" in node:
        length = int(node["sequence"].get("length", -1))
        outer = (*shape, length if length >= 0 else None)
        yield from _declared_fields(node["sequence"]["feature"], prefix, outer)
    elif "classLabel" in node:
        yield name, {"dtype": "int64", "shape": shape, "label_names": ()}
    elif "image" in node:
        yield name, {"shape": (*shape, *_shape(node["image"]))}
    elif "boundingBox" in node:
        yield name, {"shape": (*shape, *_shape(node["boundingBox"]))}
    elif "tensor" in node:
        tensor = node["tensor"]
        fields: dict[str, object] = {"shape": (*shape, *_shape(tensor))}
        if tensor.get("encoding", "none") == "none":
            yield name, fields | {"dtype": tensor["dtype"]}
        elif tensor["encoding"] == "bytes":
            yield name, fields | {"dtype": tensor["dtype"], "encoding": "raw"}


def _shape(node: Mapping[str, Any]) -> _Shape:
    dims = [int(dim) for dim in node.get("shape", {}).get("dimensions", ())]
    return tuple(dim if dim >= 0 else None for dim in dims)
