"""ImageNet (ILSVRC 2012) as it is published, in folders or in the archives as downloaded.

Folders: `SRC/train/n01440764/*.JPEG`, and `SRC/val/` with class folders or, as the archive unpacks,
without. Archives: `SRC/ILSVRC2012_img_train.tar` (an archive of archives, one a class) and
`ILSVRC2012_img_val.tar`. Validation images without class folders need the development kit beside
(`ILSVRC2012_devkit_t12.tar.gz`, packed or not), which holds their classes. Labels count the WordNet
ids in alphabetical order, as everybody's weights do.

Russakovsky et al. 2015, "ImageNet Large Scale Visual Recognition Challenge"; the layout is that of
the readme of the development kit. `--split` is `train` (the default) or `validation`.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources import imagenet_devkit
from pipelines.sources.image_coding import ImageCoding
from pipelines.sources.source import Example, Options, Source, files_below, fingerprint

OPTIONS = frozenset({"split", "image_size", "quality"})
_ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "validation": "ILSVRC2012_img_val.tar"}
_FOLDERS = {"train": "train", "validation": "val"}


class _Image(NamedTuple):
    """Where an image's bytes are, and its class where the layout tells."""

    path: Path
    offset: int
    num_bytes: int | None  # None: to the end of the file
    name: str
    wnid: str | None


def fits(location: str) -> bool:
    """Whether one of the archives is here, or a training folder with WordNet ids for classes."""
    folder = Path(location)
    if any((folder / name).is_file() for name in _ARCHIVES.values()):
        return True
    train = folder / "train"
    return train.is_dir() and any(_is_wnid(path.name) for path in train.iterdir())


class ImageNet(Source):
    """Images with their label and the name of their file."""

    def __init__(self, folder: Path, split: str, coding: ImageCoding) -> None:
        self._coding = coding
        self._images, files = _images(folder, split)
        if self._images and self._images[0].wnid is None:
            wnids = imagenet_devkit.validation_wnids(folder, len(self._images))
            self._images = [
                image._replace(wnid=wnid) for image, wnid in zip(self._images, wnids, strict=True)
            ]
        classes = tuple(sorted({str(image.wnid) for image in self._images}))
        self._labels = {wnid: i for i, wnid in enumerate(classes)}
        self.features = (
            coding.feature(),
            Feature(name="label", dtype="int64", encoding="list", label_names=classes),
            Feature(name="file", dtype="string", encoding="bytes"),
        )
        files += imagenet_devkit.files(folder) if split == "validation" else []
        mark = fingerprint(files, folder)
        self.description = f"ImageNet, {split}, {len(self)} images {mark}, {coding.description}"

    def __len__(self) -> int:
        return len(self._images)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        for number in numbers:
            image = self._images[number]
            with image.path.open("rb") as file:
                file.seek(image.offset)
                data = file.read() if image.num_bytes is None else file.read(image.num_bytes)
            yield {
                "image": self._coding.encode(data, f"{image.path}: {image.name}"),
                "label": self._labels[str(image.wnid)],
                "file": image.name,
            }


def open_source(location: str, options: Options) -> Source:
    """Opens one split.

    Raises:
        DataError: no such split, its files are missing, or a class cannot be told.
    """
    split = options.split or "train"
    if split not in _ARCHIVES:
        raise DataError(f"--split: expected train or validation, got {split!r}")
    coding = ImageCoding.of("jpeg", 3, options.image_size, options.quality)
    return ImageNet(Path(location), split, coding)


def _images(folder: Path, split: str) -> tuple[list[_Image], list[Path]]:
    """The images of a split in the order of their names, and the files they are in."""
    images, archive = folder / _FOLDERS[split], folder / _ARCHIVES[split]
    if images.is_dir():
        files = files_below(images, {".jpeg", ".jpg"})
        return [_loose(path) for path in files], files
    if not archive.is_file():
        raise DataError(f"{folder}: expected {images.name}/ or {archive.name}, found neither")
    try:
        found = list(_in_train_archive(archive) if split == "train" else _in_archive(archive))
    except tarfile.TarError as error:
        raise DataError(f"{archive}: not an archive that can be read: {error}") from None
    return sorted(found, key=lambda image: image.name), [archive]


def _loose(path: Path) -> _Image:
    wnid = path.parent.name if _is_wnid(path.parent.name) else None
    return _Image(path, 0, None, path.name, wnid)


def _in_archive(archive: Path) -> Iterator[_Image]:
    """Images are read where they lie in the archive: nothing is unpacked."""
    with tarfile.open(archive, "r:") as outer:
        for member in outer:
            if member.isfile():
                name = Path(member.name).name
                yield _Image(archive, member.offset_data, member.size, name, None)


def _in_train_archive(archive: Path) -> Iterator[_Image]:
    with tarfile.open(archive, "r:") as outer:
        for of_class in outer:
            wnid = Path(of_class.name).stem
            with tarfile.open(fileobj=outer.extractfile(of_class), mode="r:") as inner:
                for member in inner:
                    if member.isfile():
                        offset = of_class.offset_data + member.offset_data
                        name = Path(member.name).name
                        yield _Image(archive, offset, member.size, name, wnid)


def _is_wnid(name: str) -> bool:
    """WordNet's ids of nouns: n and eight digits."""
    return len(name) == 9 and name[0] == "n" and name[1:].isdigit()
