"""`Source`: the interface of data formats. Examples can be read in any order and process."""

from __future__ import annotations

import abc
import functools
import hashlib
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, cast

from jsonargparse.typing import PositiveInt
from pydantic import BaseModel, ConfigDict, Field

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format.feature import Feature
from pipelines.sources.account import Account, printable
from pipelines.sources.encodings import unpacked
from pipelines.sources.types import TYPES, Reading
from pipelines.storage import AnyPath, RemotePath

Example = Mapping[str, object]


def _flag(text: str, default: Any = None, **arguments: Any) -> Any:
    """Declares an option: the help of its flag, and arguments of argparse."""
    return Field(default, description=text, json_schema_extra=arguments)


class Options(BaseModel):
    """Options of sources. None, False and () mean that an option is not given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    split: str | None = _flag("the split to pack: train, test, ...")
    splits: str | None = _flag(
        "names of folders or files that are splits, as train=Trn,test=Tst; none: no splits; "
        "default: by words such as train, Training, val, dev, test",
        metavar="NAMES",
    )
    data_dir: str | None = _flag("tfds: folder of prepared data sets", metavar="DIR")
    label: str | None = _flag("tables: the column of class names")
    fill: tuple[str, ...] = _flag(
        "tables: value for empty cells of a column; repeat the flag for several columns",
        (), action="append", metavar="COLUMN=VALUE",
    )  # fmt: skip
    drop_gaps: bool = _flag("tables: drop rows with empty cells", False, action="store_true")
    column: tuple[str, ...] = _flag(
        f"tables: type of a column: {', '.join(TYPES)}; repeat the flag",
        (), action="append", metavar="NAME=TYPE",
    )  # fmt: skip
    encoding: str | None = _flag(
        "CSV, JSON, text: such as cp1252; default: detected", metavar="NAME"
    )
    delimiter: str | None = _flag(
        "CSV: between cells, or 'tab'; default: detected", metavar="CHARACTER"
    )
    quote: str | None = _flag(
        "CSV: around cells, or 'none'; default: detected", metavar="CHARACTER"
    )
    header: str | None = _flag(
        "CSV: 'first' if the first row has the names of the columns; otherwise 'none', or the "
        "names as A,B,C",
        metavar="NAMES",
    )
    classes: tuple[str, ...] = _flag(
        "images, texts: a class that may have no examples here; repeat the flag",
        (), action="append", metavar="NAME",
    )  # fmt: skip
    whole_files: bool = _flag(
        "text: one example per file; default: one per line", False, action="store_true"
    )
    image_size: str | None = _flag(
        "resize images: 256 sets the shorter side; 224x224 also crops to exactly that size",
        metavar="PIXELS",
    )
    image_format: Literal["jpeg", "png", "auto"] | None = _flag(
        "format to store; default: unchanged; auto: jpeg if there are several",
        choices=["jpeg", "png", "auto"],
    )
    quality: int | None = _flag(
        "re-encode JPEGs with this quality, 1 to 100; default if resized: 95",
        type=PositiveInt, metavar="N",
    )  # fmt: skip
    channels: int | None = _flag(
        "channels of decoded images: 1, 3 or 4", type=PositiveInt, metavar="N"
    )
    bits: int | None = _flag(
        "bits per channel of decoded images, 8 or 16; default: those of unchanged PNGs",
        type=PositiveInt, metavar="N",
    )  # fmt: skip
    skip_damaged: bool = _flag(
        "image folders: leave out images that cannot be decoded, with a line in the account",
        False, action="store_true",
    )  # fmt: skip

    def given(self) -> dict[str, object]:
        """Returns the options that were given."""
        return {name: value for name, value in self if value not in (None, False, ())}

    def check(self, source: str, known: Collection[str]) -> None:
        """Checks that no option is given that the source would ignore.

        Raises:
            DataError: An option does not apply.
        """
        for name in self.given():
            if name not in known:
                flags = ", ".join(f"--{k.replace('_', '-')}" for k in sorted(known)) or "none"
                raise DataError(
                    f"--{name.replace('_', '-')}: does not apply to {source}, which accepts {flags}"
                )


class Source(abc.ABC):
    """Examples that are read by their numbers. Instances are pickled to the worker processes.

    Attributes:
        features: Features of every example.
        description: Description of the examples for the index, which differs if the examples do.
        files: The files that are read; None: not those of a folder that the user chose.
        skipped: Reasons by file for further files that the source knows and does not read.
        readings: What each column of a table was read as.
    """

    features: tuple[Feature, ...]
    description: str
    files: Sequence[AnyPath] | None = None
    skipped: Mapping[AnyPath, str] = {}
    readings: Sequence[Reading] = ()

    @functools.cached_property
    def account(self) -> Account:
        """What became of the contents of the source when it was opened. Workers do not get it."""
        return Account()

    @functools.cached_property
    def changes(self) -> Account:
        """What was done to the examples that were read since it was deleted."""
        return Account()

    def __getstate__(self) -> dict[str, object]:
        """Leaves out cached properties, which every worker process computes itself."""
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(type(self), name, None), functools.cached_property)
        }

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abc.abstractmethod
    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        """Yields the examples with these numbers, in this order.

        Raises:
            DataError: An example cannot be read; the message names the file.
        """


def fingerprint(paths: Sequence[AnyPath], root: AnyPath, *, contents: bool = False) -> str:
    """Returns a hash of the names, sizes and times of files, or of their names and contents.

    In an object store, the mark of an object stands for its time and contents.
    """
    digest = hashlib.sha256()
    for path in paths:
        if isinstance(path, RemotePath):
            name = str(storage.relative(path, root))
            found = path.mark() if len(paths) == 1 else _listing(cast(RemotePath, root))[name]
            digest.update(f"{name}\0{found}\n".encode())
            continue
        status = path.stat()
        mark = str(status.st_mtime_ns)
        if contents:
            with path.open("rb") as file:
                mark = hashlib.file_digest(file, "sha256").hexdigest()
        name = os.path.relpath(path, str(root))
        digest.update(os.fsencode(f"{name}\0{status.st_size}\0{mark}\n"))
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=1)
def _listing(folder: RemotePath) -> Mapping[str, tuple[int, str]]:
    """Returns the objects of a folder, as `RemotePath.files` does. It is listed only once."""
    return folder.files()


class Listing(NamedTuple):
    """All files below a folder.

    Attributes:
        files: Those that may be data, in sorted order.
        num_clutter: Number of files that systems create.
        left_out: Other files by the reason why they cannot be data.
    """

    files: list[Any]
    num_clutter: int
    left_out: Mapping[str, list[AnyPath]]


#: Files and folders, in lowercase, that operating systems and editors create in every folder.
_CLUTTER = re.compile(
    r"\.ds_store|thumbs\.db|ehthumbs\.db|desktop\.ini|\.directory|\.localized|\._.*|__macosx|@eadir|"
    r"\.git|\.gitignore|\.gitattributes|\.ipynb_checkpoints|\.trashes|\.spotlight-v100|\.fseventsd"
)


@functools.lru_cache(maxsize=8)
def listing(folder: AnyPath) -> Listing:
    """Returns all files below a folder, also behind links. It is listed only once."""
    everything: list[tuple[Any, str]]
    if isinstance(folder, RemotePath):
        everything = [(folder / name, "") for name in sorted(_listing(folder))]
    else:
        everything = sorted(_walk(folder)) if folder.is_dir() else []
    files, num_clutter, left_out = [], 0, defaultdict[str, list[AnyPath]](list)
    for path, problem in everything:
        parts = storage.relative(path, folder).parts
        if is_clutter(parts):
            num_clutter += 1
        elif problem or any(part.startswith(".") for part in parts):
            left_out[problem or "hidden"].append(path)
        else:
            files.append(path)
    return Listing(files, num_clutter, left_out)


def is_clutter(parts: Iterable[str]) -> bool:
    """Returns whether the folders and the name of a path are those of files that systems create."""
    return any(_CLUTTER.fullmatch(part.lower()) for part in parts)


_EMPTY = "without files"


def _walk(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields every file and empty folder and, if it cannot be read, why.

    Follows links, but not in circles.
    """
    waiting = [(str(folder), frozenset([_identity(folder.stat())]))]
    while waiting:
        directory, above = waiting.pop()
        with os.scandir(directory) as scanned:
            if not (entries := list(scanned)) and directory != str(folder):
                yield Path(directory), _EMPTY
            for entry in entries:
                path = Path(entry.path)
                try:
                    status = entry.stat()
                except OSError:
                    yield path, "broken link"
                    continue
                identity = _identity(status)
                if not entry.is_dir():
                    yield path, "" if entry.is_file() else "no regular file"
                elif identity in above:
                    yield path, "link to a folder that contains it"
                else:
                    waiting.append((entry.path, above | {identity}))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


#: Suffixes of compressed files, which only sources of text read.
COMPRESSED = frozenset(
    {".gz", ".tgz", ".txz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z", ".rar"}
)
#: Files of the split that is read, by folder, if other files there belong to other splits.
_of_split: dict[AnyPath, frozenset[AnyPath]] = {}
#: The folders of other splits and their files, by the folder that is read.
_other_splits: dict[AnyPath, list[tuple[AnyPath, list[Any]]]] = {}


def list_again() -> None:
    """Forgets which files a folder has."""
    _listing.cache_clear()
    listing.cache_clear()
    unpacked.cache_clear()
    _of_split.clear()
    _other_splits.clear()


def read_split(
    folder: AnyPath, files: Iterable[AnyPath] | None, others: Iterable[tuple[AnyPath, list[Any]]]
) -> None:
    """Chooses one of several splits.

    Args:
        folder: The folder that has it.
        files: Its files, besides which `files_below` returns none; None: all of the folder.
        others: The folders of the other splits, and their files.
    """
    _other_splits[folder] = list(others)
    if files is not None:
        _of_split[folder] = frozenset(files)


def other_splits(
    folder: AnyPath, suffixes: Collection[str]
) -> Iterator[tuple[AnyPath, list[AnyPath]]]:
    """Yields the folders of the splits beside the one that is read, and their files."""
    for root, files in _other_splits.get(folder, ()):
        yield root, [path for path in files if has_suffix(path, suffixes)]


def is_folder(path: AnyPath) -> bool:
    """Returns whether there is a folder at a path, without a request if it was listed."""
    return path.is_dir() if isinstance(path, Path) else bool(_listing(path))


def has_suffix(path: AnyPath | PurePath, suffixes: Collection[str]) -> bool:
    """Returns whether the name of a file ends with one of these suffixes, in any case."""
    return path.name.lower().endswith(tuple(suffixes))


def suffix_of(path: AnyPath) -> str:
    """Returns the suffix of a file in lowercase, without that of its compression."""
    suffix = path.suffix.lower()
    return PurePath(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


def has_files(location: str, suffixes: Collection[str]) -> bool:
    """Returns whether a location is a file with one of the suffixes, or a folder of such files."""
    path = storage.at(location)
    return bool(files_below(path, suffixes)) if is_folder(path) else has_suffix(path, suffixes)


def files_below(folder: AnyPath, suffixes: Collection[str] | None = None) -> list[Any]:
    """Returns all files with one of the suffixes, without hidden files, in sorted order."""
    files = listing(folder).files
    if chosen := _of_split.get(folder):
        files = [path for path in files if path in chosen]
    return [path for path in files if suffixes is None or has_suffix(path, suffixes)]


def list_files(folder: str | AnyPath) -> list[Any]:
    """Returns all files below a folder that may be data, also behind links, in sorted order.

    Example:
        >>> [path.name for path in pipelines.list_files("data/digits")][-2:]
        ['index.json', 'offsets.npz']
    """
    list_again()
    return files_below(storage.at(folder))


def add_files(
    account: Account,
    used: Collection[AnyPath],
    root: AnyPath,
    why: str,
    *,
    skipped: Mapping[AnyPath, str] = {},
    split: tuple[str, AnyPath] | None = None,
) -> None:
    """Adds every file below a folder to an account: used, or left out.

    Args:
        account: The account.
        used: The files that are read.
        root: The folder that the user chose.
        why: The reason for files that are not read.
        skipped: Other reasons by file.
        split: The split that is read, if there are several, and the folder that has it.
    """
    files, used = listing(root), set(used)
    account.use("files", len(used))
    account.add_clutter("files", files.num_clutter)
    others = defaultdict(list, files.left_out)
    of_split = set(files_below(split[1])) if split else set()
    for path in files.files:
        if path not in used:
            reason = why if not split or path in of_split else f"not in the split {split[0]}"
            reason = "compressed; unpack it first" if has_suffix(path, COMPRESSED) else reason
            others[skipped.get(path, reason)].append(path)
    for reason, paths in others.items():
        names = (storage.relative(path, root) for path in paths[:3])
        kind = "folders" if reason == _EMPTY else "files"
        account.leave_out(kind, reason, *names, count=len(paths))


def class_names(
    paths: Sequence[AnyPath],
    folder: AnyPath,
    account: Account,
    given: Iterable[str],
    *,
    loose_allowed: bool,
) -> tuple[str, ...]:
    """Returns the sorted names of class subfolders, or none if all files are in the folder itself.

    Classes of other splits are among them, so that a number means the same class in all splits.

    Args:
        paths: The files.
        folder: The folder.
        account: Gets what is guessed.
        given: More names, of classes that may have no examples here.
        loose_allowed: Whether some files may be in the folder itself and others in subfolders,
            which are then no classes.

    Raises:
        DataError: Some files are in the folder itself and others in subfolders.
    """
    names, loose, count, inner = set(), list[AnyPath](), 0, set[str]()
    for path in paths:
        parts = storage.relative(path, folder).parts
        count += 1
        if len(parts) > 1:
            names.add(printable(parts[0]))
            inner |= {"/".join(parts[:2])} if len(parts) > 2 else set()
        else:
            loose.append(path)
    if names and loose and not loose_allowed:
        raise DataError(f"{printable(loose[0])}: has no class; move it to one of the class folders")
    if names and loose:
        change = "read without classes, because some are in no subfolder"
        account.change("files", change, *(path.name for path in loose), count=count, guessed=True)
        return ()
    suffixes = {path.suffix.lower() for path in paths}
    for root, files in other_splits(folder, suffixes) if names else ():
        parts_of_all = [storage.relative(path, root).parts for path in files]
        absent = {printable(parts[0]) for parts in parts_of_all if len(parts) > 1} - names
        account.change("classes", "have examples in other splits only", *sorted(absent))
        names |= absent
    names |= set(given) if names else set()
    report_alike(names, account)
    if len(names) == 1 and inner:
        change = "read as one class, whose subfolders are no classes"
        account.change("files", change, *sorted(inner), count=count, guessed=True)
    return tuple(sorted(names))


def report_alike(classes: Iterable[str], account: Account) -> None:
    """Adds names of classes to an account that people would not tell apart."""
    groups = defaultdict[str, list[str]](list)
    for name in sorted(classes):
        groups[" ".join(unicodedata.normalize("NFKC", name).casefold().split())].append(name)
    alike = [name for names in groups.values() if len(names) > 1 for name in names]
    change = "differ from others only in case, spaces or Unicode form"
    account.change("classes", change, *map(repr, alike), guessed=True)
