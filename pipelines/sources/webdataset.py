"""WebDataset: tar files whose members of one example share a name (`a.jpg`, `a.cls`, `a.json`).

The part of a member's name after the first dot of its last component is its kind. `cls` holds a
class number, one kind may be an image, and all others are stored as bytes.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources.images import IMAGE_SUFFIXES, coding_for
from pipelines.sources.images import OPTIONS as OPTIONS
from pipelines.sources.source import Example, Options, Source, files_below, fingerprint

_LABEL = "cls"


class _Member(NamedTuple):
    """The bytes of a member within its tar file."""

    begin: int
    num_bytes: int


class _Sample(NamedTuple):
    """One example: its tar file, its name in it, and its members by kind."""

    tar: Path
    name: str
    members: Mapping[str, _Member]

    def read(self, file: BinaryIO, kind: str) -> bytes:
        """Returns the contents of a member from the opened tar file."""
        begin, num_bytes = self.members[kind]
        file.seek(begin)
        data = file.read(num_bytes)
        if len(data) != num_bytes:
            raise DataError(f"{self.tar}: ends within {self.name}.{kind}")
        return data


def fits(location: str) -> bool:
    """Returns whether the location is a tar file or a folder of tar files."""
    path = Path(location)
    return bool(files_below(path, {".tar"})) if path.is_dir() else path.suffix == ".tar"


class WebDataset(Source):
    """The examples of tar files, with image, label, and further members."""

    def __init__(self, tars: Sequence[Path], root: Path, options: Options) -> None:
        self._samples = [sample for tar in tars for sample in _samples(tar)]
        self._root = root
        if not self._samples:
            raise DataError(f"{root}: expected tar files with examples, found none")
        self._kinds = _common_kinds(self._samples)
        images = [kind for kind in self._kinds if f".{kind}".lower() in IMAGE_SUFFIXES]
        if len(images) > 1:
            raise DataError(f"{root}: expected one image in an example, found {', '.join(images)}")
        self._image = images[0] if images else None
        features = [Feature(name="key", dtype="string", encoding="bytes")]
        self._coding = None
        if self._image:
            by_path = {
                sample.tar / f"{sample.name}.{self._image}": sample for sample in self._samples
            }

            def open_image(path: Path) -> BinaryIO:
                sample = by_path[path]
                with sample.tar.open("rb") as file:
                    return io.BytesIO(sample.read(file, str(self._image)))

            self._coding = coding_for(list(by_path), options, open_image)
            features.append(self._coding.feature())
        elif options.given():
            raise DataError(f"{root}: has no images, to which the options apply")
        for kind in self._kinds:
            if kind == _LABEL:
                features.append(Feature(name="label", dtype="int64", encoding="list"))
            elif kind != self._image:
                features.append(Feature(name=kind, dtype="string", encoding="bytes"))
        self.features = tuple(features)
        coding = f", {self._coding.description}" if self._coding else ""
        self.description = f"webdataset, {len(self)} examples {fingerprint(tars, root)}{coding}"

    def __len__(self) -> int:
        return len(self._samples)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        for number in numbers:
            sample = self._samples[number]
            with sample.tar.open("rb") as file:
                found = {kind: sample.read(file, kind) for kind in self._kinds}
            yield self._example(sample, found)

    def _example(self, sample: _Sample, found: Mapping[str, bytes]) -> Example:
        example: dict[str, object] = {"key": sample.name}
        for kind, data in found.items():
            place = f"{sample.tar}: {sample.name}.{kind}"
            if self._coding and kind == self._image:
                example["image"] = self._coding.encode(data, place)
            elif kind == _LABEL:
                try:
                    example["label"] = int(data)
                except ValueError:
                    raise DataError(
                        f"{place}: expected a class number, got {data[:20]!r}"
                    ) from None
            else:
                example[kind] = data
        return example


def open_source(location: str, options: Options) -> Source:
    """Opens a tar file, or the tar files of a folder."""
    path = Path(location)
    tars = files_below(path, {".tar"}) if path.is_dir() else [path]
    return WebDataset(tars, path if path.is_dir() else path.parent, options)


def _samples(tar: Path) -> Iterator[_Sample]:
    """Yields the examples of a tar file in their order.

    Raises:
        DataError: It is not a tar file, is compressed, or an example has two members of one kind.
    """
    name, members = "", dict[str, _Member]()
    try:
        with tarfile.open(tar, "r:") as opened:
            for entry in opened:
                folder, _, file = entry.name.rpartition("/")
                stem, dot, kind = file.partition(".")
                if not entry.isfile() or not stem or not dot:
                    continue  # a folder, a hidden file, or one that belongs to no example
                found = f"{folder}/{stem}" if folder else stem
                if found != name and members:
                    yield _Sample(tar, name, members)
                    members = {}
                if kind in members:
                    raise DataError(f"{tar}: has {entry.name} twice")
                name, members[kind] = found, _Member(entry.offset_data, entry.size)
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{tar}: not a readable tar file without compression: {error}") from None
    if members:
        yield _Sample(tar, name, members)


def _common_kinds(samples: Sequence[_Sample]) -> tuple[str, ...]:
    """Returns the kinds of members, which all examples must have.

    Raises:
        DataError: An example lacks one.
    """
    kinds = samples[0].members.keys()
    for sample in samples:
        if missing := kinds ^ sample.members.keys():
            raise DataError(
                f"{sample.tar}: {sample.name}: {sorted(missing)[0]!r} is not in every example; "
                "give every example the same kinds of members"
            )
    return tuple(sorted(kinds))
