"""CelebA as published: `img_align_celeba/` beside `list_attr_celeba.txt` and other lists.

Liu, Luo, Wang and Tang 2015, "Deep Learning Face Attributes in the Wild". `--split` is `train` (the
default), `validation` or `test` of `list_eval_partition.txt`, or `all`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources.images import ImageCoding
from pipelines.sources.source import Example, Options, Source, fingerprint

OPTIONS = frozenset({"split", "image_size", "quality"})
_ATTRIBUTES = "list_attr_celeba.txt"
_PARTITION = "list_eval_partition.txt"
_SPLITS = ("train", "validation", "test")


def fits(location: str) -> bool:
    """Returns whether the folder has the list of attributes and the images."""
    folder = Path(location)
    return (folder / _ATTRIBUTES).is_file() and (folder / "img_align_celeba").is_dir()


class CelebA(Source):
    """Aligned faces with 40 binary attributes."""

    def __init__(self, folder: Path, split: str, coding: ImageCoding) -> None:
        self._folder, self._coding = folder, coding
        names, attributes = _read_attributes(folder / _ATTRIBUTES)
        chosen, partition = list(attributes), folder / _PARTITION
        if split != "all":
            if not partition.is_file():
                raise DataError(
                    f"{partition}: missing; it assigns images to splits. Get it, or use --split all"
                )
            words, number = partition.read_text("utf-8").split(), str(_SPLITS.index(split))
            of_split = dict(zip(words[::2], words[1::2], strict=False))
            chosen = [name for name in chosen if of_split.get(name) == number]
        self._files = chosen
        self._values = np.array([attributes[name] for name in chosen]).reshape(-1, len(names))
        self.features = (
            coding.feature(),
            Feature(
                name="attributes",
                dtype="bool",
                shape=(len(names),),
                encoding="list",
                label_names=names,
            ),
            Feature(name="file", dtype="string", encoding="bytes"),
        )
        mark = fingerprint([folder / _ATTRIBUTES], folder, contents=True)
        pictures = [path for name in chosen if (path := _image(folder, name)).exists()]
        mark += f" {fingerprint(pictures, folder)}"
        self.description = f"CelebA, {split}, {len(self)} images {mark}, {coding.description}"

    def __len__(self) -> int:
        return len(self._files)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        for number in numbers:
            name = self._files[number]
            path = _image(self._folder, name)
            if not path.exists():
                raise DataError(f"{path}: listed in {_ATTRIBUTES}, but the file is missing")
            yield {
                "image": self._coding.encode(path.read_bytes(), str(path)),
                "attributes": self._values[number],
                "file": name,
            }


def open_source(location: str, options: Options) -> Source:
    """Opens one split.

    Raises:
        DataError: The split does not exist, or a list is damaged.
    """
    split = options.split or "train"
    if split not in (*_SPLITS, "all"):
        raise DataError(f"--split: expected {', '.join(_SPLITS)} or all, got {split!r}")
    coding = ImageCoding.of("jpeg", 3, options.image_size, options.quality)
    return CelebA(Path(location), split, coding)


def _image(folder: Path, name: str) -> Path:
    return folder / "img_align_celeba" / name


def _read_attributes(path: Path) -> tuple[tuple[str, ...], dict[str, list[bool]]]:
    """Returns the names of the attributes, and their values by image.

    The first line has the number of images, the second the names of the attributes. Each further
    line has an image and its attributes, 1 or -1.
    """
    lines = path.read_text("utf-8").splitlines()
    names = tuple(lines[1].split()) if len(lines) > 1 else ()
    attributes = {}
    for number, line in enumerate(lines[2:], start=3):
        name, *values = line.split()
        if len(values) != len(names) or not set(values) <= {"1", "-1"}:
            raise DataError(
                f"{path}: line {number}: expected a file and {len(names)} values of 1 or -1, got "
                f"{line[:60]!r}"
            )
        attributes[name] = [value == "1" for value in values]
    if not lines or lines[0].strip() != str(len(attributes)):
        raise DataError(
            f"{path}: the first line must be the number of images, {len(attributes)}; the file may "
            "be truncated"
        )
    return names, attributes
