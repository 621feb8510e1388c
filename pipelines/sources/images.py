"""A folder of images, one subfolder a class: `SRC/cat/1.jpg`; or without classes: `SRC/1.jpg`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from PIL import Image

from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources.image_coding import ImageCoding
from pipelines.sources.source import (
    Example,
    Options,
    Source,
    class_names,
    files_below,
    fingerprint,
)

OPTIONS = frozenset({"image_format", "image_size", "quality", "channels"})
_FORMATS: dict[str, Literal["jpeg", "png"]] = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png"}
_SUFFIXES = frozenset(_FORMATS) | {".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm"}
_NUM_LOOKED_AT = 64


def fits(location: str) -> bool:
    """Whether the location is a folder with images in it."""
    return Path(location).is_dir() and bool(files_below(Path(location), _SUFFIXES))


class ImageFolder(Source):
    """The images of a folder, with their class and their path in it."""

    def __init__(self, folder: Path, paths: Sequence[Path], options: Options) -> None:
        self._folder, self._paths = folder, list(paths)
        self._classes = class_names(self._paths, folder)
        self._coding = coding_for(self._paths, options)
        self.features = (self._coding.feature(), *label_features(self._classes))
        mark = fingerprint(self._paths, folder)
        self.description = f"images, {len(self)} files {mark}, {self._coding.description}"

    def __len__(self) -> int:
        return len(self._paths)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        for number in numbers:
            path = self._paths[number]
            name = path.relative_to(self._folder)
            example: dict[str, object] = {
                "image": self._coding.encode(path.read_bytes(), str(path)),
                "file": str(name),
            }
            if self._classes:
                example["label"] = self._classes.index(name.parts[0])
            yield example


def open_source(location: str, options: Options) -> Source:
    """Opens an image folder."""
    folder = Path(location)
    return ImageFolder(folder, files_below(folder, _SUFFIXES), options)


def label_features(classes: tuple[str, ...]) -> tuple[Feature, ...]:
    """The features beside the data of a folder of classes."""
    file = Feature(name="file", dtype="string", encoding="bytes")
    if not classes:
        return (file,)
    return Feature(name="label", dtype="int64", encoding="list", label_names=classes), file


def coding_for(paths: Sequence[Path], options: Options) -> ImageCoding:
    """How to store these files: as they are if they allow it and nothing else is asked for.

    Raises:
        DataError: they are of several formats and the user has not chosen one.
    """
    suffixes = Counter(path.suffix.lower() for path in paths)
    formats = {_FORMATS.get(suffix) for suffix in suffixes}
    image_format = options.image_format or formats.pop()
    if image_format is None or (formats and not options.image_format):
        found = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common())
        raise DataError(
            f"images are stored as jpeg or as png, found {found}; pass --image-format jpeg or "
            "--image-format png to encode the others again"
        )
    channels = options.channels or _channels(paths)
    return ImageCoding.of(image_format, channels, options.image_size, options.quality)


def _channels(paths: Sequence[Path]) -> int:
    """One channel if all of a sample are grey, else three; a wrong guess is an error later."""
    step = -(-len(paths) // _NUM_LOOKED_AT)
    for path in paths[::step]:
        try:
            with Image.open(path) as image:
                if image.mode not in ("L", "1"):
                    return 3
        except OSError as error:
            raise DataError(f"{path}: not an image that can be read: {error}") from None
    return 1
