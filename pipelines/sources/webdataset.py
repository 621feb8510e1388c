"""WebDataset: tar files whose members of one example share a name (`a.jpg`, `a.cls`, `a.json`).

The part of a member's name after the first dot of its last component is its kind. `cls` holds a
class number, one kind may be an image, and all others are stored as bytes.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import BinaryIO, NamedTuple

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources.images import IMAGE_SUFFIXES, coding_for
from pipelines.sources.images import OPTIONS as OPTIONS
from pipelines.sources.source import (
    Example,
    Options,
    Source,
    files_below,
    fingerprint,
    has_files,
    is_folder,
)
from pipelines.storage import AnyPath

SUFFIXES = frozenset({".tar"})
_LABEL = "cls"


class _Member(NamedTuple):
    """The bytes of a member within its tar file."""

    begin: int
    num_bytes: int


class _Sample(NamedTuple):
    """One example: its tar file, its name in it, and its members by kind."""

    tar: AnyPath
    name: str
    members: Mapping[str, _Member]

    def read(self, *kinds: str) -> dict[str, bytes]:
        """Returns the contents of members, which are neighbors in the tar file and read at once."""
        first = min(self.members[kind].begin for kind in kinds)
        last = max(self.members[kind].begin + self.members[kind].num_bytes for kind in kinds)
        data, found = storage.read_range(self.tar, first, last), {}
        for kind in kinds:
            begin, num_bytes = self.members[kind]
            found[kind] = data[begin - first : begin - first + num_bytes]
            if len(found[kind]) != num_bytes:
                raise DataError(f"{self.tar}: ends within {self.name}.{kind}")
        return found


def fits(location: str) -> bool:
    """Returns whether the location is a tar file or a folder of tar files."""
    return has_files(location, {".tar"})


class WebDataset(Source):
    """The examples of tar files, with image, label, and further members."""

    def __init__(self, tars: Sequence[AnyPath], root: AnyPath, options: Options) -> None:
        of_tars = storage.in_order(lambda tar: list(_samples(tar)), tars, root)
        self._samples = [sample for of_tar in of_tars for sample in of_tar]
        self._root, self.files = root, list(tars)
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
            image = self._image
            by_path = {
                PurePosixPath(f"{sample.tar}/{sample.name}.{image}"): sample
                for sample in self._samples
            }

            def open_image(path: PurePosixPath) -> BinaryIO:
                return io.BytesIO(by_path[path].read(image)[image])

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
        samples = [self._samples[number] for number in numbers]
        read = storage.in_order(lambda one: one.read(*self._kinds), samples, self._root)
        yield from map(self._example, samples, read)

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
    path = storage.at(location)
    if is_folder(path):
        return WebDataset(files_below(path, {".tar"}), path, options)
    return WebDataset([path], path.parent, options)


def _samples(tar: AnyPath) -> Iterator[_Sample]:
    """Yields the examples of a tar file in their order.

    Raises:
        DataError: It is not a tar file, is compressed, or an example has two members of one kind.
    """
    name, members = "", dict[str, _Member]()
    try:
        with tar.open("rb") as data, tarfile.open(fileobj=data, mode="r:") as opened:
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
