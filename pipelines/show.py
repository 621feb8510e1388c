"""`python -m pipelines.show DIR`: prints features and label counts, and draws a contact sheet."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jsonargparse import ArgumentParser
from jsonargparse.typing import NonNegativeInt, PositiveInt
from PIL import Image, ImageDraw, ImageFont, ImageOps

from pipelines import storage
from pipelines.console import command_line
from pipelines.errors import DataError, cause_of
from pipelines.format import record_file
from pipelines.format.feature import Feature
from pipelines.format.index import Index, Shard, load_index
from pipelines.sources.account import print_account
from pipelines.storage import AnyPath

_MOST_CHARACTERS = 60
_DESCRIPTION = """Shows the contents of a folder: its features, its first record, the number of
records per label, and a PNG with some of its images."""
_NUM_AT_ONCE = 256


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command_line.run(_parser(), _show, arguments)


def _show(directory: str, num_images: int, num_records: int, to: str | None = None) -> None:
    folder = storage.at(directory)
    index = load_index(folder)
    command_line.print_summary(index, folder)
    print_account(folder)
    counts, first = LabelCounts(index), list[bytes]()
    serialized = _records(folder, index, num_records)
    while chunk := list(itertools.islice(serialized, _NUM_AT_ONCE)):
        counts.add(chunk)
        first += chunk[: max(num_images, 1) - len(first)]
    if not first:
        return
    command_line.print_facts({"first record": "", **describe_record(first[0], index)})
    of = "all" if counts.num_records == index.num_records else f"{counts.num_records:,} sampled"
    for feature, of_label in counts.by_feature().items():
        command_line.print_table(
            (feature, f"of {of} records", "percent"),
            (
                (name, f"{count:,}", f"{count / counts.num_records:.1%}")
                for name, count in of_label.items()
            ),
        )
    if to:
        path = Path(to)
    elif isinstance(folder, Path):
        path = folder.resolve().with_name(f"{folder.resolve().name}.png")
    else:
        path = Path(f"{folder.name}.png")
    num_shown = contact_sheet(first[:num_images], index, path)
    print(f"{num_shown} images: {path}" if num_shown else "The data contain no images to show.")


def _parser() -> ArgumentParser:
    parser = command_line.parser("show", _DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="folder or URL with an index")
    parser.add_argument(
        "--to", "--out", metavar="FILE", help="PNG to write; default: DIR.png beside a local folder"
    )
    parser.add_argument(
        "--num-images",
        type=NonNegativeInt,
        metavar="N",
        default=36,
        help="images on the contact sheet",
    )
    parser.add_argument(
        "--num-records",
        type=PositiveInt,
        metavar="N",
        default=10_000,
        help="records in which labels are counted, taken from the beginning of each shard",
    )
    return parser


def _records(directory: AnyPath, index: Index, num_records: int) -> Iterator[bytes]:
    """Yields serialized records from the beginning of each shard, alternating between shards.

    Raises:
        DataError: A record is damaged.
    """

    def read_shard(shard: Shard) -> Iterator[bytes]:
        intact = record_file.intact_records(directory / shard.name, index.compression)
        yield from (record.data for record in itertools.islice(intact, per_shard))

    per_shard = -(-num_records // max(index.num_shards, 1))
    turns = itertools.zip_longest(*map(read_shard, index.shards))
    alternating = (data for turn in turns for data in turn if data is not None)
    return itertools.islice(alternating, num_records)


def describe_record(record: bytes, index: Index) -> dict[str, str]:
    """Returns the value of each feature of a record as a short text."""
    import tensorflow as tf

    from pipelines.format.examples import decode

    example = decode(tf.constant(record), index.features, decode_images=False)
    return {f.name: _format_value(example[f.name].numpy(), f) for f in index.features}


class LabelCounts:
    """Counts the records with each label.

    Attributes:
        num_records: Number of records counted so far.
    """

    def __init__(self, index: Index) -> None:
        self.num_records = 0
        self._features = [f for f in index.features if f.label_names and None not in f.shape]
        self._counts = {f.name: np.zeros(len(f.label_names), np.int64) for f in self._features}

    def add(self, serialized: Sequence[bytes]) -> None:
        """Counts records."""
        import tensorflow as tf

        from pipelines.format.examples import decode

        self.num_records += len(serialized)
        if not self._features:
            return
        batch = decode(tf.constant(serialized), self._features)
        for feature in self._features:
            values, counts = batch[feature.name].numpy(), self._counts[feature.name]
            if feature.shape:  # a vector of attributes, each present or not
                counts += (values != 0).sum(axis=0)
            else:
                labels = values[(values >= 0) & (values < len(feature.label_names))]
                counts += np.bincount(labels, minlength=len(feature.label_names))

    def by_feature(self) -> dict[str, dict[str, int]]:
        """Returns the counts by feature and label, most frequent first."""
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
        The number of images. Without images, no file is written.

    Raises:
        DataError: An image cannot be decoded.
    """
    import tensorflow as tf

    from pipelines.format.examples import decode

    pixels = [f for f in index.features if f.dtype == "uint8" and len(f.shape) in (2, 3)]
    shown = [f for f in pixels if len(f.shape) == 2 or f.shape[2] in (1, 3, 4)]
    image = next((f for f in index.features if f.is_image or f in shown), None)
    label = next((f for f in index.features if f.label_names and not f.shape), None)
    if image is None or not records:
        return 0
    displayed = [image, label] if label else [image]
    images, captions = [], []
    for record in records:
        try:
            example = decode(tf.constant(record), displayed)
        except tf.errors.InvalidArgumentError as error:
            raise DataError(
                f"feature {image.name!r}: {cause_of(error)}; see pipelines.verify"
            ) from None
        images.append(example[image.name].numpy())
        captions.append(_format_value(example[label.name].numpy(), label) if label else "")
    _save_sheet(images, captions, path)
    return len(images)


def _format_value(value: object, feature: Feature) -> str:
    if feature.is_image and isinstance(value, bytes):
        return f"{feature.encoding}, {len(value):,} bytes"
    if feature.label_names and not feature.shape:
        number = int(np.asarray(value))
        is_label = 0 <= number < len(feature.label_names)
        return feature.label_names[number] if is_label else str(number)
    if isinstance(value, bytes):
        text = value.decode("utf-8", "replace")
    else:
        text = np.array2string(np.asarray(value), threshold=8, separator=", ").replace("\n", "")
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."


_CELL, _CAPTION, _MARGIN = 128, 18, 6  # pixels
_BACKGROUND, _INK = "white", "black"


def _save_sheet(images: Sequence[np.ndarray], captions: Sequence[str], path: Path) -> None:
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    step_x, step_y = _CELL + _MARGIN, _CELL + _CAPTION + _MARGIN
    sheet = Image.new("RGB", (columns * step_x + _MARGIN, rows * step_y + _MARGIN), _BACKGROUND)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    brightest = max(1, *(int(image.max(initial=0)) for image in images))
    for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = _MARGIN + i % columns * step_x, _MARGIN + i // columns * step_y
        sheet.paste(_cell(image / brightest), (x, y))
        while font.getlength(caption) > _CELL:
            caption = caption.removesuffix("…")[:-1] + "…"
        draw.text((x, y + _CELL + 2), caption, _INK, font)
    sheet.save(path, "png")


def _cell(image: np.ndarray) -> Image.Image:
    pixels = np.round(image * 255).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    # Pixels of small images are shown as squares.
    few = max(pixels.shape[:2]) < _CELL / 2
    resampling = Image.Resampling.NEAREST if few else Image.Resampling.BICUBIC
    image_of_any_mode = Image.fromarray(pixels).convert("RGB")
    return ImageOps.pad(image_of_any_mode, (_CELL, _CELL), resampling, color=_BACKGROUND)


if __name__ == "__main__":
    sys.exit(main())
