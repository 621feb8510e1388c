"""Infers the features of records, and refines them by tensorflow-datasets' metadata.

A record stores for each feature whether it holds bytes, floats or integers, and how many. What it
does not store (that bytes are an array, that numbers are pixels) is read from the `features.json`
and `*.labels.txt` files of tensorflow-datasets, or has to be declared.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from pydantic import ValidationError

from pipelines.errors import DataError
from pipelines.format.feature import Encoding, Feature, image_format
from pipelines.storage import AnyPath

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

    def add(self, feature: Any) -> None:
        """Adds one `tf.train.Feature`."""
        kind = feature.WhichOneof("kind")
        values = getattr(feature, kind).value if kind else ()
        self.num_records += 1
        self._add_length(len(values), len(values))
        if values:
            self.kinds.add(kind)
        if kind == "bytes_list":
            for value in values:
                self._add_bytes(value)

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
        if shape == () and len(formats) == 1 and self.formats == formats:
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

    def _add_bytes(self, value: bytes) -> None:
        encoding = image_format(value)
        if encoding:
            try:
                with Image.open(io.BytesIO(value)) as image:
                    width, height = image.size
                    channels = _CHANNELS.get(image.mode, 3)
                    if image.getexif().get(_ORIENTATION, 1) in range(5, 9):
                        width, height = height, width
            except OSError:
                encoding = None
            else:
                channels = 3 if (channels, encoding) == (4, "jpeg") else channels
                self.channels = max(self.channels, channels)
                self.bits = max(self.bits, value[_BITS_OF_PNG] if encoding == "png" else 8)
                if len(self.sizes) < 2:
                    self.sizes.add((height, width))
        self.formats.add(encoding)


def add_example(seen: dict[str, FeatureStatistics], example: Any) -> None:
    """Adds every feature of a `tf.train.Example`."""
    for name, feature in example.features.feature.items():
        seen.setdefault(name, FeatureStatistics()).add(feature)


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

    Args:
        features: Inferred features by name.
        folder: The folder of the shards.

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
    """Returns the feature with the declared fields, or unchanged if they do not fit."""
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
