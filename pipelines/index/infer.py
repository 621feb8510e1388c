"""Features of records that others wrote, from the records themselves.

A record says of each feature whether it holds bytes, floats or whole numbers, and how many. What it
cannot say (that bytes are an array, that numbers are pixels) has to be declared.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from pipelines.format.feature import Encoding, Feature, image_format

_DTYPES = {"bytes_list": "string", "float_list": "float32", "int64_list": "int64"}
#: Stored without a transparency of its own: palettes and the like become colours.
_CHANNELS = {"1": 1, "L": 1, "I": 1, "I;16": 1, "RGBA": 4}


@dataclass
class Seen:
    """What the records seen so far say of one feature.

    Attributes:
        kinds: its field in `tf.train.Feature`, of those records that hold a value.
        lengths: the fewest and the most values in a record.
        num_records: that have it.
        formats: of its bytes, None for any that are no image.
        channels: the most of its images.
        sizes: heights and widths of its images; a second one is enough to know that they differ.
    """

    kinds: set[str] = field(default_factory=set)
    lengths: tuple[int, int] | None = None
    num_records: int = 0
    formats: set[Encoding | None] = field(default_factory=set)
    channels: int = 0
    sizes: set[tuple[int, int]] = field(default_factory=set)

    def add(self, feature: Any) -> None:
        """Looks at one `tf.train.Feature`."""
        kind = feature.WhichOneof("kind")
        values = getattr(feature, kind).value if kind else ()
        self.num_records += 1
        self._add_length(len(values), len(values))
        if values:
            self.kinds.add(kind)
        if kind == "bytes_list":
            for value in values:
                self._add_bytes(value)

    def merge(self, other: Seen) -> None:
        """Adds what was seen elsewhere."""
        self.kinds |= other.kinds
        self.num_records += other.num_records
        self.formats |= other.formats
        self.channels = max(self.channels, other.channels)
        self.sizes |= other.sizes
        if other.lengths:
            self._add_length(*other.lengths)

    def feature(self, name: str, num_records: int) -> Feature:
        """The feature, of so many records in all; an absent one is an empty one."""
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
                dtype="uint8",
                shape=(height, width, self.channels),
                encoding=formats.pop(),
            )
        # Never a value in any record: nothing is known, and any kind of list reads it.
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
            except OSError:
                encoding = None
            else:
                channels = 3 if (channels, encoding) == (4, "jpeg") else channels
                self.channels = max(self.channels, channels)
                if len(self.sizes) < 2:
                    self.sizes.add((height, width))
        self.formats.add(encoding)


def add_example(seen: dict[str, Seen], example: Any) -> None:
    """Looks at every feature of a `tf.train.Example`."""
    for name, feature in example.features.feature.items():
        seen.setdefault(name, Seen()).add(feature)


def merge(seen: dict[str, Seen], other: Mapping[str, Seen]) -> None:
    """Adds what was seen of other records."""
    for name, of_feature in other.items():
        seen.setdefault(name, Seen()).merge(of_feature)
