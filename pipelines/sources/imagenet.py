"""ImageNet (ILSVRC 2012) as published, in folders or in the downloaded archives.

Folders: `SRC/train/n01440764/*.JPEG`, and `SRC/val/` with or without class folders. Archives:
`SRC/ILSVRC2012_img_train.tar` (with an inner archive per class) and `ILSVRC2012_img_val.tar`.
Validation images without class folders require the development kit in the same folder
(`ILSVRC2012_devkit_t12.tar.gz`, packed or unpacked), which contains their classes. Its own class
numbers are mapped to WordNet ids by `meta.mat`. Labels are the positions of the WordNet ids in
alphabetical order, as in published weights.

Russakovsky et al. 2015, "ImageNet Large Scale Visual Recognition Challenge"; the layout is that of
the readme of the development kit. `--split` is `train` (the default) or `validation`.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources.images import ImageCoding
from pipelines.sources.source import Example, Options, Source, files_below, fingerprint

OPTIONS = frozenset({"split", "image_size", "quality"})
_ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "validation": "ILSVRC2012_img_val.tar"}
_FOLDERS = {"train": "train", "validation": "val"}


class _Image(NamedTuple):
    """The location of an image's bytes, and its class if the layout contains it."""

    path: Path
    offset: int
    num_bytes: int | None  # None: to the end of the file
    name: str
    wnid: str | None


def fits(location: str) -> bool:
    """Returns whether the folder has an archive, or `train/` with WordNet ids as classes."""
    folder = Path(location)
    if any((folder / name).is_file() for name in _ARCHIVES.values()):
        return True
    train = folder / "train"
    return train.is_dir() and any(_is_wnid(path.name) for path in train.iterdir())


class ImageNet(Source):
    """Images with label and file name."""

    def __init__(self, folder: Path, split: str, coding: ImageCoding) -> None:
        self._coding = coding
        self._images, files = _images(folder, split)
        if self._images and self._images[0].wnid is None:
            wnids = _validation_wnids(folder, len(self._images))
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
        if split == "validation":
            devkit = [folder / name for name in (_GROUND_TRUTH, _META, _DEVKIT)]
            files += [path for path in devkit if path.is_file()]
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
        DataError: The split does not exist, its files are missing, or classes are unknown.
    """
    split = options.split or "train"
    if split not in _ARCHIVES:
        raise DataError(f"--split: expected train or validation, got {split!r}")
    coding = ImageCoding.of("jpeg", 3, options.image_size, options.quality)
    return ImageNet(Path(location), split, coding)


def _images(folder: Path, split: str) -> tuple[list[_Image], list[Path]]:
    images, archive = folder / _FOLDERS[split], folder / _ARCHIVES[split]
    if images.is_dir():
        files = files_below(images, {".jpeg", ".jpg"})
        wnids = (name if _is_wnid(name := path.parent.name) else None for path in files)
        pairs = zip(files, wnids, strict=True)
        return [_Image(path, 0, None, path.name, wnid) for path, wnid in pairs], files
    if not archive.is_file():
        raise DataError(f"{folder}: expected {images.name}/ or {archive.name}, found neither")
    try:
        members = list(_in_train_archive(archive) if split == "train" else _in_archive(archive))
    except tarfile.TarError as error:
        raise DataError(f"{archive}: not an archive that can be read: {error}") from None
    return sorted(members, key=lambda image: image.name), [archive]


def _in_archive(archive: Path) -> Iterator[_Image]:
    """Yields the positions of images in an archive, from which they are read directly."""
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
    """Returns whether a name is a WordNet id of a noun: n and eight digits."""
    return len(name) == 9 and name[0] == "n" and name[1:].isdigit()


_DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
_GROUND_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
_META = "ILSVRC2012_devkit_t12/data/meta.mat"


def _validation_wnids(folder: Path, num_images: int) -> list[str]:
    # SciPy is slow to import, and only needed for these images.
    from scipy.io import loadmat

    numbers = [int(line) for line in _read_devkit(folder, _GROUND_TRUTH).split()]
    if len(numbers) != num_images:
        raise DataError(
            f"{folder}: {_GROUND_TRUTH} lists {len(numbers)} images, found {num_images}; get the "
            "missing images, or remove others"
        )
    synsets = loadmat(io.BytesIO(_read_devkit(folder, _META)), squeeze_me=True)["synsets"]
    wnids = {int(synset["ILSVRC2012_ID"]): str(synset["WNID"]) for synset in synsets}
    return [wnids[number] for number in numbers]


def _read_devkit(folder: Path, name: str) -> bytes:
    if (folder / name).is_file():
        return (folder / name).read_bytes()
    if not (folder / _DEVKIT).is_file():
        raise DataError(
            f"{folder}: the classes of images without class folders are in {_DEVKIT}; copy it to "
            "this folder"
        )
    try:
        with tarfile.open(folder / _DEVKIT) as archive:
            member = archive.extractfile(name)
            return member.read() if member else b""
    except (tarfile.TarError, KeyError, EOFError) as error:
        raise DataError(f"{folder / _DEVKIT}: not the development kit: {error}") from None
