"""WebDataset: tar files whose members of one example share a name (`a.jpg`, `a.cls`, `a.json`).

The part of a member's name after the first dot of its last component is its kind, in any case.
`cls` holds a class number, one kind may be an image, and all others are stored as bytes. Kinds
called `key`, `image` or `label` keep their dot beside the features of these names.
"""

from __future__ import annotations

import io
import posixpath
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources.account import Account, printable
from pipelines.sources.images import CODING_OPTIONS, IMAGE_SUFFIXES, coding_for
from pipelines.sources.source import (
    Example,
    Options,
    Source,
    files_below,
    fingerprint,
    has_files,
    is_clutter,
    is_folder,
)
from pipelines.storage import AnyPath

OPTIONS = CODING_OPTIONS
SUFFIXES = frozenset({".tar"})
_LABEL = "cls"
#: Bytes that are read and not used, rather than sending another request.
_MOST_UNUSED = 1 << 16
_CHUNK_BYTES = 1 << 20
_MOST_LINKS = 8


class _Member(NamedTuple):
    """The bytes of a member within its tar file.

    Attributes:
        begin: Position of the first stored byte.
        num_bytes: Number of stored bytes.
        size: Number of bytes of the member.
        pieces: Position and size of the stored bytes in a sparse member; zeros are not stored.
    """

    begin: int
    num_bytes: int
    size: int
    pieces: tuple[tuple[int, int], ...] | None = None

    def contents(self, stored: bytes) -> bytes:
        """Returns the bytes of the member for its stored bytes."""
        if self.pieces is None:
            return stored
        data, at = bytearray(self.size), 0
        for begin, size in self.pieces:
            data[begin : begin + size] = stored[at : at + size]
            at += size
        return bytes(data)


class _Sample(NamedTuple):
    tar: AnyPath
    name: str
    members: Mapping[str, _Member]

    def read(self, *kinds: str) -> dict[str, bytes]:
        """Returns the contents of members, which are neighbors in the tar file and read at once."""
        members = [self.members[kind] for kind in kinds]
        groups: list[list[int]] = []  # begin and end of neighbors: a link may point far away
        for begin, num_bytes, *_ in sorted(members):
            if groups and begin - groups[-1][1] < _MOST_UNUSED:
                groups[-1][1] = max(groups[-1][1], begin + num_bytes)
            else:
                groups.append([begin, begin + num_bytes])
        data = {begin: storage.read_range(self.tar, begin, end) for begin, end in groups}
        contents = {}
        for kind, member in zip(kinds, members, strict=True):
            first = max(begin for begin in data if begin <= member.begin)
            stored = data[first][member.begin - first :][: member.num_bytes]
            if len(stored) != member.num_bytes:
                raise DataError(f"{self.tar}: ends within {printable(self.name)}.{kind}")
            contents[kind] = member.contents(stored)
        return contents


def fits(location: str) -> bool:
    """Returns whether the location is a tar file or a folder of tar files."""
    return has_files(location, {".tar"})


class WebDataset(Source):
    """The examples of tar files, with image, label, and further members."""

    def __init__(self, tars: Sequence[AnyPath], root: AnyPath, options: Options) -> None:
        self._samples: list[_Sample] = []
        for samples, account in storage.in_order(_contents, tars, root):
            self._samples += samples
            self.account.merge(account)
        self._root, self.files = root, list(tars)
        if not self._samples:
            raise DataError(f"{root}: expected tar files with examples, found none")
        self._kinds = _common_kinds(self._samples)
        counts = Counter(sample.name for sample in self._samples)
        repeated = [name for name, count in counts.items() if count > 1]
        self.account.change("keys", "are those of several examples", *repeated, guessed=True)
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
        reserved = {"key"} | ({"image"} if self._image else set())
        reserved |= {"label"} if _LABEL in self._kinds else set()
        self._names = {k: f".{k}" if k in reserved else printable(k) for k in self._kinds}
        for kind in self._kinds:
            if kind == _LABEL:
                features.append(Feature(name="label", dtype="int64", encoding="list"))
            elif kind != self._image:
                features.append(Feature(name=self._names[kind], dtype="string", encoding="bytes"))
                if kind in reserved:
                    self.account.change("members", f"stored as .{kind}", count=len(self._samples))
        self.features = tuple(features)
        coding = f", {self._coding.description}" if self._coding else ""
        self.description = f"webdataset, {len(self)} examples {fingerprint(tars, root)}{coding}"

    def __len__(self) -> int:
        return len(self._samples)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        samples = [self._samples[number] for number in numbers]
        read = storage.in_order(lambda one: one.read(*self._kinds), samples, self._root)
        yield from map(self._example, samples, read)

    def _example(self, sample: _Sample, members: Mapping[str, bytes]) -> Example:
        example: dict[str, object] = {"key": sample.name}
        for kind, data in members.items():
            item = f"{sample.name}.{kind}"
            name = printable(f"{sample.tar}: {item}")
            if self._coding and kind == self._image:
                example["image"] = self._coding.encode(data, name, self.changes, item)
            elif kind == _LABEL:
                try:
                    example["label"] = int(data)
                except ValueError:
                    raise DataError(f"{name}: expected a class number, got {data[:20]!r}") from None
            else:
                example[self._names[kind]] = data
        return example


def open_source(location: str, options: Options) -> Source:
    """Opens a tar file, or the tar files of a folder."""
    path = storage.at(location)
    if is_folder(path):
        return WebDataset(files_below(path, {".tar"}), path, options)
    return WebDataset([path], path.parent, options)


def _contents(tar: AnyPath) -> tuple[list[_Sample], Account]:
    """Returns the examples of a tar file in their order, and the account of its members."""
    samples, account, name, members = list[_Sample](), Account(), "", dict[str, _Member]()
    try:
        # What follows an end, as in tar files that were concatenated, is read, too.
        with (
            tar.open("rb") as data,
            tarfile.open(fileobj=data, mode="r:", ignore_zeros=True) as opened,
        ):
            entries = [*_intact_entries(tar, data, opened)]
            by_name = {posixpath.normpath(entry.name): entry for entry in entries}
            for entry in entries:
                folder, _, file = entry.name.rpartition("/")
                stem, dot, kind = file.partition(".")
                kind = kind.lower()
                member = _member(entry, by_name)
                if is_clutter(entry.name.split("/")):
                    account.add_clutter("members", 1)
                elif isinstance(member, str):
                    account.leave_out("members", member, entry.name)
                elif not stem or not dot:
                    account.leave_out("members", "without name or suffix", entry.name)
                else:
                    of_example = f"{folder}/{stem}" if folder else stem
                    if of_example != name and members:
                        samples.append(_Sample(tar, name, members))
                        members = {}
                    if kind in members:
                        raise DataError(f"{tar}: has {printable(entry.name)} twice")
                    name, members[kind] = of_example, member
                    account.use("members", 1)
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{tar}: not a readable tar file without compression: {error}") from None
    if members:
        samples.append(_Sample(tar, name, members))
    return samples, account


def _intact_entries(
    tar: AnyPath, data: BinaryIO, opened: tarfile.TarFile
) -> Iterator[tarfile.TarInfo]:
    end = 0

    def check(next_begin: int) -> None:
        data.seek(end)
        while (at := data.tell()) < next_begin:
            chunk = data.read(min(_CHUNK_BYTES, next_begin - at))
            if not chunk:
                return
            if rest := chunk.lstrip(b"\0"):
                raise DataError(
                    f"{tar}: damaged at byte {at + len(chunk) - len(rest)}: no header of a member; "
                    "restore it, or extract its files and pack them"
                )

    while (entry := opened.next()) is not None:
        begin, after = entry.offset, opened.offset
        if begin > end:
            check(begin)
        end = after
        if not entry.isdir():
            yield entry
    check(storage.num_bytes(tar))


def _member(entry: tarfile.TarInfo, by_name: Mapping[str, tarfile.TarInfo]) -> _Member | str:
    """Returns where the contents of an entry are, also of a link, or why there are none."""
    for _ in range(_MOST_LINKS):
        if not (entry.islnk() or entry.issym()):
            break
        folder = posixpath.dirname(entry.name) if entry.issym() else ""
        target = posixpath.normpath(posixpath.join(folder, entry.linkname))
        if target not in by_name:
            return "link to something outside"
        entry = by_name[target]
    if not entry.isfile():
        return "no regular file"
    sparse: Any = entry.sparse if entry.issparse() else None
    if sparse is None:
        return _Member(entry.offset_data, entry.size, entry.size)
    pieces = tuple((begin, size) for begin, size in sparse)
    return _Member(entry.offset_data, sum(size for _, size in pieces), entry.size, pieces)


def _common_kinds(samples: Sequence[_Sample]) -> tuple[str, ...]:
    kinds = samples[0].members.keys()
    for sample in samples:
        if missing := kinds ^ sample.members.keys():
            same_name = [one for one in samples if one[:2] == sample[:2]]
            cure = "give every example the same kinds of members"
            if len(same_name) > 1:
                cure = (
                    "write the members of each example beside each other, as tar --sort=name does"
                )
            raise DataError(
                f"{sample.tar}: {sample.name}: {sorted(missing)[0]!r} is not in every example; "
                f"{cure}"
            )
    return tuple(sorted(kinds))
