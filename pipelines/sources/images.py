"""Image folders with one subfolder per class (`SRC/cat/1.jpg`) or without classes (`SRC/1.jpg`).

`ImageCoding` stores image files unchanged, or decodes, resizes and encodes them again.
"""

from __future__ import annotations

import functools
import importlib
import io
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources import decoding
from pipelines.sources.account import Account, printable
from pipelines.sources.source import (
    Example,
    Options,
    Source,
    class_names,
    files_below,
    fingerprint,
    has_suffix,
    is_folder,
)
from pipelines.storage import AnyPath, RemotePath

_DEFAULT_QUALITY = 95
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_GRAY = ("1", "L", "I", "LA")
#: What Pillow raises for damaged files.
DAMAGE = (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError)
#: The largest height and width of a JPEG.
_LARGEST_SIDE = 65_500
_ORIENTATION = 0x0112  # of EXIF


class ImageCoding(BaseModel):
    """How an image file is stored in a record.

    Attributes:
        format: Format of the stored file.
        channels: Number of channels to which reading decodes it.
        bits: Bits per channel to which reading decodes it, 8 or for PNG 16.
        size: `(height, width)` resizes and center-crops to exactly that size; one number resizes
            the shorter side; None keeps the size.
        quality: Quality of re-encoded JPEGs, 1 to 100; None re-encodes only if something else
            changes.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["jpeg", "png"]
    channels: int = 3
    bits: int = 8
    size: int | tuple[int, int] | None = None
    quality: int | None = None

    @classmethod
    def of(
        cls,
        format: Literal["jpeg", "png"],
        channels: int,
        size: str | None,
        quality: int | None,
        bits: int = 8,
    ) -> Self:
        """Creates a coding from command line values, with `size` as `256` or `224x224`.

        Raises:
            DataError: A value is invalid.
        """
        if quality is not None and not (format == "jpeg" and 1 <= quality <= 100):
            raise DataError(f"--quality: expected 1 to 100, for jpeg, got {quality} for {format}")
        if channels not in _MODES or (format, channels) == ("jpeg", 4):
            raise DataError(f"--channels: expected 1, 3 or for png 4, got {channels} for {format}")
        if bits not in (8, 16) or (format, bits) == ("jpeg", 16):
            raise DataError(f"--bits: expected 8 or for png 16, got {bits} for {format}")
        if size is None:
            return cls(format=format, channels=channels, bits=bits, quality=quality)
        if not (match := re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", size)):
            raise DataError(
                f"--image-size: expected pixels as 256 (shorter side) or 224x224 (height x width), "
                f"got {size!r}"
            )
        height, width = match.groups()
        pixels = (int(height), int(width)) if width else int(height)
        return cls(format=format, channels=channels, bits=bits, size=pixels, quality=quality)

    @property
    def description(self) -> str:
        """A description that differs if the stored bytes do."""
        size = f"{self.size[0]}x{self.size[1]}" if isinstance(self.size, tuple) else self.size
        words = [f"{self.channels} channels {self.format}"]
        words += [f"of {self.bits} bits"] if self.bits != 8 else []
        words += [f"of {size} pixels"] if size else []
        words += [f"quality {self.quality}"] if self.quality else []
        return " ".join(words)

    def feature(self, name: str = "image") -> Feature:
        """Returns the feature of such images."""
        height, width = self.size if isinstance(self.size, tuple) else (None, None)
        return Feature(
            name=name,
            dtype="uint16" if self.bits == 16 else "uint8",
            shape=(height, width, self.channels),
            encoding=self.format,
        )

    def encode(
        self, data: bytes, name: str, changes: Account | None = None, item: str = ""
    ) -> bytes:
        """Returns the bytes to store for an image file.

        Args:
            data: The bytes of the file, in any format that Pillow reads.
            name: Name of the file for error messages.
            changes: Gets what is done to the image.
            item: Name of the file in `changes`; default: `name`.

        Returns:
            The same bytes if nothing has to change. They were decoded as a check.

        Raises:
            DataError: The image is damaged, TensorFlow cannot decode it, or it has more channels or
                bits than are stored.
        """
        try:
            with warnings.catch_warnings(), Image.open(io.BytesIO(data)) as image:
                warnings.simplefilter("ignore")  # warnings about metadata, which is not stored
                is_gray = image.mode.startswith(_GRAY) or self._is_mask(image)
                if self.channels < 3 and not is_gray:
                    raise DataError(
                        f"{name}: is a color image ({image.mode}), but {self.channels} channel is "
                        "stored; pass --channels 3"
                    )
                bits = _bits(image, data)
                is_turned = image.getexif().get(_ORIENTATION, 1) in range(2, 9)
                is_kept = _stored_format(image) == self.format and self.size is self.quality is None
                is_kept = is_kept and not is_turned and not self._is_mask(image)
                if changes is not None:
                    for change, guessed in self._changes(image, bits, is_turned):
                        changes.change("images", change, item or name, guessed=guessed)
                if is_kept:
                    if bits < self.bits:
                        raise DataError(
                            f"{name}: has {bits} bits per channel and others have {self.bits}, "
                            f"which would multiply its values; convert it, or pass --bits {bits}"
                        )
                    image.draft(None, (1, 1))  # reads every byte but computes few pixels
                    image.load()
                    if not decoding.is_plain(data):
                        decoding.check(data, self.feature(), name)
                    return data
                upright = ImageOps.exif_transpose(image)
                if self._is_mask(image):
                    upright = Image.fromarray(np.asarray(upright))
                stored, out = self._with_bits(upright, bits, name), io.BytesIO()
                quality = self.quality or _DEFAULT_QUALITY
                options = {"quality": quality} if self.format == "jpeg" else {}
                self._resize(stored, name).save(out, self.format, **options)
                return out.getvalue()
        except DataError:
            raise
        except DAMAGE as error:
            raise _unreadable(name, error) from None

    def _is_mask(self, image: Image.Image) -> bool:
        """Returns whether an image has class numbers, which its palette shows as colors."""
        return (
            image.mode == "P" and image.format == "PNG" and (self.channels, self.size) == (1, None)
        )

    def _changes(
        self, image: Image.Image, bits: int, is_turned: bool
    ) -> Iterator[tuple[str, bool]]:
        """Yields what is done to an image besides resizing, and whether that is a guess."""
        if self._is_mask(image):
            yield "stored as the numbers of their palette, without its colors", True
        if is_turned:
            yield "turned upright", False
        if _stored_format(image) != self.format:
            yield f"converted from {image.format} to {self.format}", False
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
            yield "reduced to the first of several frames", True
        if bits > self.bits:
            yield f"reduced from {bits} to {self.bits} bits per channel", False
        if image.has_transparency_data and self.channels != 4:
            yield "read without transparency", False

    def _with_bits(self, image: Image.Image, bits: int, name: str) -> Image.Image:
        """Returns an image with the bits per channel that are stored, in a mode of Pillow."""
        if image.mode in ("I", "F") and bits != 16:
            raise DataError(
                f"{name}: has values of 32 bits (mode {image.mode}); convert it to 8 or 16 bits"
            )
        if bits == 16 and image.mode.startswith("I"):  # Pillow would clip larger values to 255
            pixels = np.asarray(image).astype("uint16")
            return Image.fromarray(pixels if self.bits == 16 else (pixels >> 8).astype("uint8"))
        if self.bits == 16:
            raise DataError(
                f"{name}: only gray images can be stored again with 16 bits; pass --bits 8, or "
                "omit --image-size"
            )
        return image

    def _resize(self, image: Image.Image, name: str) -> Image.Image:
        if self.bits == 8:
            image = image.convert(_MODES[self.channels])
        if isinstance(self.size, tuple):
            height, width = self.size
            return ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
        if self.size is None:
            return image
        scale = self.size / min(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        if max(width, height) > _LARGEST_SIDE:
            raise DataError(
                f"{name}: {image.height}x{image.width} pixels would become {height}x{width}; crop "
                "it, or pass --image-size HEIGHTxWIDTH"
            )
        return image.resize((width, height), Image.Resampling.BICUBIC)


CODING_OPTIONS = frozenset({"image_format", "image_size", "quality", "channels", "bits"})
OPTIONS = CODING_OPTIONS | {"skip_damaged", "classes"}
_FORMATS: dict[str, Literal["jpeg", "png"]] = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif", ".pjpeg", ".mpo"), "jpeg"),
    **dict.fromkeys((".png", ".apng"), "png"),
}
_OF_PILLOW = (".bmp", ".dib", ".gif", ".tif", ".tiff", ".webp", ".avif", ".jp2", ".j2k")
_PORTABLE = (".ppm", ".pgm", ".pbm", ".pnm")
#: Files that are images.
IMAGE_SUFFIXES = frozenset((*_FORMATS, *_OF_PILLOW, *_PORTABLE))
_HEIF_SUFFIXES = (".heic", ".heif", ".hif")
_RAW_SUFFIXES = (".dng", ".nef", ".cr2", ".cr3", ".arw", ".orf", ".rw2", ".pef", ".srw", ".raf")
#: Files that are no images, so that their contents need not be looked at.
_OTHER_SUFFIXES = re.compile(
    r"\.(txt|csv|tsv|jsonl?|xml|ya?ml|md|html?|py|np[yz]|mat|h5|hdf5|parquet|arrow|tfrecord|tar|zip|"
    r"gz|pdf|mp[34]|avi|mov|wav)"
)
#: Pillow's names of the formats for which the contents of other files are looked at.
_PILLOW_FORMATS = ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "JPEG2000", "PPM"]
_NUM_SAMPLED = 64


def fits(location: str) -> bool:
    """Returns whether the location is a folder with images."""
    path = storage.at(location)
    return is_folder(path) and bool(_images_below(path)[0])


class ImageFolder(Source):
    """The images of a folder, with class and relative path."""

    def __init__(
        self,
        folder: AnyPath,
        paths: Sequence[AnyPath],
        options: Options,
        skipped: Mapping[AnyPath, str],
    ) -> None:
        self._folder, self._paths = folder, list(paths)
        self.files = self._paths
        self.skipped = skipped
        self._classes = class_names(
            self._paths, folder, self.account, options.classes, loose_allowed=False
        )
        try:
            self._coding = coding_for(self._paths, options)
        except decoding.DamagedError as error:
            raise _advised(error) from None
        self.features = (self._coding.feature(), *label_features(self._classes))
        mark = fingerprint(self._paths, folder)
        self.description = f"images, {len(self)} files {mark}, {self._coding.description}"
        self._skips = options.skip_damaged
        self.description += ", without damaged ones" if self._skips else ""

    def __len__(self) -> int:
        return len(self._paths)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        paths = [self._paths[number] for number in numbers]
        read = storage.in_order(lambda path: path.read_bytes(), paths, self._folder)
        for path, data in zip(paths, read, strict=True):
            name = storage.relative(path, self._folder)
            try:
                image = self._coding.encode(data, printable(path), self.changes, printable(name))
            except decoding.DamagedError as error:
                if not self._skips:
                    raise _advised(error) from None
                self.changes.move_to_left_out("files", "damaged (--skip-damaged)", name)
                self.changes.move_to_left_out("examples", "damaged (--skip-damaged)", name)
                continue
            example: dict[str, object] = {"image": image, "file": str(name)}
            if self._classes:
                example["label"] = self._classes.index(printable(name.parts[0]))
            yield example


def open_source(location: str, options: Options) -> Source:
    """Opens an image folder.

    Raises:
        DataError: It contains no images.
    """
    folder = storage.at(location)
    paths, skipped = _images_below(folder)
    if not paths:
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        why = "; ".join(f"{printable(path)}: {reason}" for path, reason in [*skipped.items()][:1])
        raise DataError(
            f"{location}: found no images, that is, no files that end with {suffixes} or whose "
            f"contents are images; {why}".rstrip("; ")
        )
    return ImageFolder(folder, paths, options, skipped)


def _images_below(folder: AnyPath) -> tuple[list[Any], dict[AnyPath, str]]:
    """Returns the images below a folder, and other files that may be some, with the reason.

    Other suffixes, or none, say nothing, so that the contents of such files are looked at.
    """
    images, skipped = [], {}
    for path in files_below(folder):
        if has_suffix(path, IMAGE_SUFFIXES):
            images.append(path)
        elif has_suffix(path, _HEIF_SUFFIXES):
            if _registers_heif():
                images.append(path)
            else:
                skipped[path] = "requires pip install pillow-heif"
        elif has_suffix(path, _RAW_SUFFIXES):  # Pillow would read the preview in them
            skipped[path] = "raw data of a camera; convert to JPEG"
        elif not _OTHER_SUFFIXES.fullmatch(path.suffix.lower()) and _is_image(path):
            images.append(path)
    return images, skipped


def _is_image(path: AnyPath) -> bool:
    if isinstance(path, RemotePath) and path.suffix:  # a request per file would take long
        return False
    try:
        with path.open("rb") as file, Image.open(file, formats=_readable_formats()):
            return True
    except DAMAGE:
        return False


@functools.cache
def _readable_formats() -> list[str]:
    """Returns those of `_PILLOW_FORMATS` that the installed Pillow has: AVIF came with 11.3."""
    Image.init()
    return [name for name in _PILLOW_FORMATS if name in Image.OPEN]


@functools.cache
def _registers_heif() -> bool:
    """Lets Pillow read HEIF, the format of iPhones, if its library is installed."""
    try:
        importlib.import_module("pillow_heif").register_heif_opener()
    except ImportError:
        return False
    return True


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
    stored = formats - {None}
    if options.image_format == "auto":
        image_format = stored.pop() if len(stored) == 1 else "jpeg"
    else:
        image_format = options.image_format or (stored.pop() if len(stored) == 1 else None)
    if image_format is None:
        counts = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common())
        raise DataError(
            f"images are stored as jpeg or as png, found {counts}; pass --image-format jpeg or "
            "--image-format png to re-encode the others"
        )
    open_file = open_file or (lambda path: io.BytesIO(path.read_bytes()))
    channels, bits = _sample(paths, open_file, skip_damaged=options.skip_damaged)
    is_kept = image_format == "png" and options.image_size is None
    return ImageCoding.of(
        image_format,
        options.channels or channels,
        options.image_size,
        options.quality,
        options.bits or (bits if is_kept else 8),
    )


def _sample(
    paths: Sequence[Any], open_file: Callable[[Any], BinaryIO], *, skip_damaged: bool
) -> tuple[Literal[1, 3], Literal[8, 16]]:
    """Returns the channels and bits of a sample: 1 if all are gray, 16 if some have 16 bits.

    A wrong guess fails later.
    """
    channels, bits = set(), set()
    for path in paths[:: -(-len(paths) // _NUM_SAMPLED)]:
        try:
            with open_file(path) as file, Image.open(file) as image:
                channels.add(1 if image.mode in ("L", "1") or image.mode.startswith("I") else 3)
                file.seek(0)
                bits.add(_bits(image, file.read(_PNG_HEADER)) if image.format == "PNG" else 8)
        except (DataError, FileNotFoundError):
            raise
        except DAMAGE as error:
            if not skip_damaged:
                raise _unreadable(str(path), error) from None
    return (1 if channels == {1} else 3), (16 if 16 in bits else 8)


#: Bytes of a PNG up to its number of bits, https://www.w3.org/TR/png/#11IHDR.
_PNG_HEADER = 25


def _bits(image: Image.Image, data: bytes) -> int:
    """Returns the bits per channel, at least 8; Pillow's mode does not tell those of a PNG."""
    if image.format == "PNG":
        return max(data[_PNG_HEADER - 1], 8)
    if image.format == "PPM" and image.mode == "I":
        return 16
    return 16 if image.mode.startswith("I;16") else 32 if image.mode in ("I", "F") else 8


def _stored_format(image: Image.Image) -> str:
    """Returns `jpeg` also for several JPEGs in one file (MPO), of which the first is read."""
    return "jpeg" if image.format == "MPO" else (image.format or "").lower()


def _advised(error: decoding.DamagedError) -> DataError:
    return DataError(f"{error}; to leave out such images, pass --skip-damaged")


def _unreadable(name: str, error: Exception) -> DataError:
    # Pillow's message names the file object by its address in memory.
    is_unknown = isinstance(error, UnidentifiedImageError)
    reason = "its format is not known, or it is damaged" if is_unknown else error
    return decoding.DamagedError(f"{name}: not a readable image: {reason}")
