"""Splits: the folders or files of one data set that are named train, validation or test.

The words are those of Hugging Face's `datasets` (`train`, `Training`, `valid`, `dev`, `eval`), in
any case, as the name of a folder (`Train/`, `train2017/`) or as a word in the name of a file
(`train-00000-of-00001.parquet`, `x_train.npy`).
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from pipelines import storage
from pipelines.errors import DataError
from pipelines.sources.account import printable
from pipelines.sources.source import files_below, list_again, listing
from pipelines.storage import AnyPath

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLITS = {word: split for split, words in _WORDS.items() for word in words}
NONE = "none"


def find_splits(location: str | AnyPath, splits: str | None = None) -> dict[str, AnyPath]:
    """Returns the folders of the splits of a data set by `train`, `validation` and `test`.

    A folder called `train` beside folders that are no splits is a class.

    Example:
        >>> from pathlib import Path
        >>> for name in ("Train/cat", "Train/dog", "val/cat", "val/dog"):
        ...     folder = Path("photos") / name
        ...     folder.mkdir(parents=True)
        ...     _ = (folder / "1.jpg").write_bytes(b"...")
        >>> {split: folder.name for split, folder in pipelines.find_splits("photos").items()}
        {'train': 'Train', 'validation': 'val'}

    Args:
        location: The folder of the data set.
        splits: `none`, or the names of the folders as `train=Trn,test=Tst`; None: by their names.

    Returns:
        The folders, none if the folder has no splits.

    Raises:
        DataError: Some folders are splits and others are not, or two are the same split.
    """
    list_again()
    return split_folders(storage.at(location), splits)


def split_folders(folder: AnyPath, splits: str | None = None) -> dict[str, AnyPath]:
    """Returns what `find_splits` does, of the files that were listed."""
    parts = (storage.relative(path, folder).parts for path in listing(folder).files)
    names = sorted({first for first, *rest in parts if rest})
    folders = _by_split(names, splits)
    others = [name for name in names if not any(name in group for group in folders.values())]
    is_exact = len(names) == 1 and names[0].lower() in _SPLITS
    if splits is not None or (len(folders) > 1 and not others) or is_exact:
        for split, group in folders.items():
            if len(group) > 1:
                raise DataError(
                    f"{folder}: {' and '.join(map(printable, group))} are both called {split}; "
                    f"choose with --splits, such as --splits {split}={printable(group[0])}"
                )
        return {split: folder / group[0] for split, group in folders.items()}
    if len(folders) > 1:
        of_splits = ", ".join(printable(name) for group in folders.values() for name in group)
        mapping = ",".join(f"{split}={printable(group[0])}" for split, group in folders.items())
        raise DataError(
            f"{folder}: contains {of_splits} beside {', '.join(map(printable, others))}; pass "
            f"--splits {mapping} if the first are splits, or --splits none if all are classes"
        )
    return split_folders(folder / names[0]) if len(names) == 1 and not folders else {}


def split_files(
    folder: AnyPath, suffixes: Collection[str] | None, splits: str | None
) -> dict[str, list[Any]]:
    """Returns the files of the splits, if there are several, by folders in classes or by names.

    Args:
        folder: The folder of the data set.
        suffixes: Suffixes of the files; None: any, and the names of files tell no splits.
        splits: As for `find_splits`.
    """
    by_name = defaultdict[str, list[Any]](list)
    for path in files_below(folder, suffixes):
        *folders, name = storage.relative(path, folder).parts
        inner = next((name for name in folders[1:] if name.lower() in _SPLITS), None)
        if inner or suffixes is not None:
            by_name[inner or name].append(path)
    files = _by_split(by_name, splits)
    if splits is None and len(files) < 2:
        return {}
    return {split: [p for n in names for p in by_name[n]] for split, names in files.items()}


def choose(location: str, found: Collection[str], split: str | None) -> str:
    """Returns the split to read.

    Raises:
        DataError: The user has chosen none of several, or one that does not exist.
    """
    words = split.lower() if split else ""
    chosen = _SPLITS.get(words, words)
    if chosen in found:
        return chosen
    if len(found) == 1 and not split:
        return next(iter(found))
    if split:
        raise DataError(f"--split: expected {' or '.join(found)}, got {split!r}")
    raise DataError(
        f"{location}: contains the splits {', '.join(found)}; pack each one into a folder of its "
        f"own, with {' or '.join(f'--split {name}' for name in found)}, or all of them as one data "
        "set with --splits none"
    )


def by_words(names: Collection[str]) -> dict[str, list[str]]:
    """Returns names by the split of which they have a word, such as `x_train`."""
    return _by_split(names, None)


def _by_split(names: Collection[str], splits: str | None) -> dict[str, list[str]]:
    by_split = defaultdict[str, list[str]](list)
    pairs = [] if splits in (None, NONE) else [pair.partition("=") for pair in splits.split(",")]
    if not all(name and pattern for name, _, pattern in pairs):
        raise DataError(f"--splits: expected none or train=NAME,test=NAME, got {splits!r}")
    patterns = {name: pattern for name, _, pattern in pairs}
    for name in names:
        if splits is not None:
            of_name = {s for s, pattern in patterns.items() if fnmatch.fnmatchcase(name, pattern)}
        else:
            of_name = {_SPLITS[w] for w in re.split(r"[^a-z]+", name.lower()) if w in _SPLITS}
        if len(of_name) == 1:
            by_split[of_name.pop()].append(name)
    return {
        split: by_split[split] for split in dict.fromkeys((*_WORDS, *patterns)) if split in by_split
    }
