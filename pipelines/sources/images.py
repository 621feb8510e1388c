"""Image folders with one subfolder per class (`SRC/cat/1.jpg`) or without classes (`SRC/1.jpg`).

`ImageCoding` stores image files unchanged, or decodes, resizes and encodes them again.
"""

from __future__ import annotations

import io
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources.account import printable
from pipelines.sources.source import (
    Example,
    Options,
    Source,
    class_names,
    files_below,
    fingerprint,
    is_folder,
)
from pipelines.storage import AnyPath

_DEFAULT_QUALITY = 95
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
#: What Pillow raises for damaged files.
_DAMAGE = (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError)


class ImageCoding(BaseModel):
    """How an image file is stored in a record.

    Attributes:
        format: Format of the stored file.
        channels: Number of channels to which reading decodes it.
        size: `(height, width)` resizes and center-crops to exactly that size; one number resizes
            the shorter side; None keeps the size.
        quality: Quality of re-encoded JPEGs, 1 to 100; None re-encodes only if something else
            changes.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["jpeg", "png"]
    channels: int = 3
    size: int | tuple[int, int] | None = None
    quality: int | None = None

    @classmethod
    def of(
        cls, format: Literal["jpeg", "png"], channels: int, size: str | None, quality: int | None
    ) -> Self:
        """Creates a coding from command line values, with `size` as `256` or `224x224`.

        Raises:
            DataError: A value is invalid.
        """
        if quality is not None and not (format == "jpeg" and 1 <= quality <= 100):
            raise DataError(f"--quality: expected 1 to 100, for jpeg, got {quality} for {format}")
        if channels not in _MODES or (format, channels) == ("jpeg", 4):
            raise DataError(f"--channels: expected 1, 3 or for png 4, got {channels} for {format}")
        if size is None:
            return cls(format=format, channels=channels, quality=quality)
        if not (match := re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", size)):
            raise DataError(
                f"--image-size: expected pixels as 256 (shorter side) or 224x224 (height x width), "
                f"got {size!r}"
            )
        height, width = match.groups()
        pixels = (int(height), int(width)) if width else int(height)
        return cls(format=format, channels=channels, size=pixels, quality=quality)

    @property
    def description(self) -> str:
        """A description that differs if the stored bytes do."""
        size = f"{self.size[0]}x{self.size[1]}" if isinstance(self.size, tuple) else self.size
        words = [f"{self.channels} channels {self.format}"]
        words += [f"of {size} pixels"] if size else []
        words += [f"quality {self.quality}"] if self.quality else []
        return " ".join(words)

    def feature(self, name: str = "image") -> Feature:
        """Returns the feature of such images."""
        height, width = self.size if isinstance(self.size, tuple) else (None, None)
        return Feature(
            name=name,
            dtype="uint8",
            shape=(height, width, self.channels),
            encoding=self.format,
        )

    def encode(self, data: bytes, name: str) -> bytes:
        """Returns the bytes to store for an image file.

        Args:
            data: The bytes of the file, in any format that Pillow reads.
            name: Name of the file for error messages.

        Returns:
            The same bytes if nothing has to change. They were decoded as a check.

        Raises:
            DataError: The image is damaged, or has more channels than are stored.
        """
        try:
            with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
                warnings.simplefilter("ignore")  # warnings about metadata, which is not stored
                self._check_channels(image, name)
                if self._keeps(image):
                    image.draft(None, (1, 1))  # reads every byte but computes few pixels
                    image.load()
                    return data
                return self._write(self._resize(_eight_bits(ImageOps.exif_transpose(image), name)))
        except DataError:
            raise
        except _DAMAGE as error:
            raise _unreadable(name, error) from None

    def _keeps(self, image: Image.Image) -> bool:
        return (image.format or "").lower() == self.format and self.size is self.quality is None

    def _check_channels(self, image: Image.Image, name: str) -> None:
        if self.channels < 3 and image.mode not in ("L", "1", "I", "I;16", "LA"):
            raise DataError(
                f"{name}: is a color image ({image.mode}), but {self.channels} channel is stored; "
                "pass --channels 3"
            )

    def _resize(self, image: Image.Image) -> Image.Image:
        image = image.convert(_MODES[self.channels])
        if isinstance(self.size, tuple):
            height, width = self.size
            return ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
        if self.size is None:
            return image
        scale = self.size / min(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        return image.resize((width, height), Image.Resampling.BICUBIC)

    def _write(self, image: Image.Image) -> bytes:
        out = io.BytesIO()
        quality = {"quality": self.quality or _DEFAULT_QUALITY} if self.format == "jpeg" else {}
        image.save(out, self.format, **quality)
        return out.getvalue()


OPTIONS = frozenset({"image_format", "image_size", "quality", "channels"})
_FORMATS: dict[str, Literal["jpeg", "png"]] = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png"}
#: Files that are images.
IMAGE_SUFFIXES = frozenset(_FORMATS) | {".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"}
_NUM_SAMPLED = 64


def fits(location: str) -> bool:
    """Returns whether the location is a folder with images."""
    path = storage.at(location)
    return is_folder(path) and bool(files_below(path, IMAGE_SUFFIXES))


class ImageFolder(Source):
    """The images of a folder, with class and relative path."""

    def __init__(self, folder: AnyPath, paths: Sequence[AnyPath], options: Options) -> None:
        self._folder, self._paths = folder, list(paths)
        self.files = self._paths
        self._classes = class_names(self._paths, folder)
        self._coding = coding_for(self._paths, options)
        self.features = (self._coding.feature(), *label_features(self._classes))
        mark = fingerprint(self._paths, folder)
        self.description = f"images, {len(self)} files {mark}, {self._coding.description}"

    def __len__(self) -> int:
        return len(self._paths)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        paths = [self._paths[number] for number in numbers]
        read = storage.in_order(lambda path: path.read_bytes(), paths, self._folder)
        for path, data in zip(paths, read, strict=True):
            name = storage.relative(path, self._folder)
            example: dict[str, object] = {
                "image": self._coding.encode(data, str(path)),
                "file": str(name),
            }
            if self._classes:
                example["label"] = self._classes.index(printable(name.parts[0]))
            yield example


def open_source(location: str, options: Options) -> Source:
    """Opens an image folder.

    Raises:
        DataError: It contains no images.
    """
    folder = storage.at(location)
    paths = files_below(folder, IMAGE_SUFFIXES)
    if not paths:
        known = ", ".join(sorted(IMAGE_SUFFIXES))
        raise DataError(f"{location}: found no images, that is, no files that end with {known}")
    return ImageFolder(folder, paths, options)


def label_features(classes: tuple[str, ...]) -> tuple[Feature, ...]:
    """Returns the features for class and file of the examples of a folder."""
    file = Feature(name="file", dtype="string", encoding="bytes")
    if not classes:
        return (file,)
    return Feature(name="label", dtype="int64", encoding="list", label_names=classes), file


def coding_for(
    paths: Sequence[Any], options: Options, open_file: Callable[[Any], BinaryIO] | None = None
) -> ImageCoding:
    """Returns how to store these files: unchanged if possible.

    Args:
        paths: The image files.
        options: Options of the command.
        open_file: Opens one of them; by default, in the file system.

    Raises:
        DataError: The files have several formats, and the user has not chosen one.
    """
    suffixes = Counter(path.suffix.lower() for path in paths)
    formats = {_FORMATS.get(suffix) for suffix in suffixes}
    image_format = options.image_format or formats.pop()
    if image_format is None or (formats and not options.image_format):
        found = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common())
        raise DataError(
            f"images are stored as jpeg or as png, found {found}; pass --image-format jpeg or "
            "--image-format png to re-encode the others"
        )
    channels = options.channels or _channels(paths, open_file or _opened)
    return ImageCoding.of(image_format, channels, options.image_size, options.quality)


def _opened(path: AnyPath) -> BinaryIO:
    return io.BytesIO(path.read_bytes())


def _channels(paths: Sequence[Any], open_file: Callable[[Any], BinaryIO]) -> int:
    """Returns 1 if a sample of the images is gray, else 3. A wrong guess fails later."""
    step = -(-len(paths) // _NUM_SAMPLED)
    for path in paths[::step]:
        try:
            with open_file(path) as file, Image.open(file) as image:
                if image.mode not in ("L", "1"):
                    return 3
        except (DataError, FileNotFoundError):
            raise
        except _DAMAGE as error:
            raise _unreadable(str(path), error) from None
    return 1


def _eight_bits(image: Image.Image, name: str) -> Image.Image:
    """Returns an image with 8 bits per channel: Pillow would clip larger values to 255.

    Raises:
        DataError: The values have 32 bits, whose range is not known.
    """
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype("uint8"))
    if image.mode in ("I", "F"):
        raise DataError(
            f"{name}: has values of 32 bits (mode {image.mode}); convert it to 8 or 16 bits"
        )
    return image


def _unreadable(name: str, error: Exception) -> DataError:
    # Pillow's message names the file object by its address in memory.
    is_unknown = isinstance(error, UnidentifiedImageError)
    reason = "its format is not known, or it is damaged" if is_unknown else error
    return DataError(f"{name}: not a readable image: {reason}")
