"""Text files, with or without class folders. An example is a line or a whole file.

Blank lines are skipped. The bytes are stored unchanged, without line ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pipelines.format.feature import Feature
from pipelines.sources.images import label_features
from pipelines.sources.source import (
    Example,
    Options,
    Source,
    class_names,
    files_below,
    fingerprint,
)

OPTIONS = frozenset({"whole_files"})
_SUFFIXES = frozenset({".txt", ".text", ".jsonl", ".md"})


def fits(location: str) -> bool:
    """Returns whether the location is a text file or a folder of them."""
    path = Path(location)
    return bool(files_below(path, _SUFFIXES)) if path.is_dir() else path.suffix in _SUFFIXES


class Text(Source):
    """Lines or whole files, with file name and class."""

    def __init__(self, folder: Path, files: Sequence[Path], whole_files: bool) -> None:
        self._folder, self._files, self._whole_files = folder, list(files), whole_files
        self._classes = class_names(files, folder)
        if whole_files:
            self._lines = np.array([(i, 0) for i in range(len(files))], np.int64).reshape(-1, 2)
        else:
            self._lines = np.concatenate(
                [np.empty((0, 2), np.int64), *(_lines(i, file) for i, file in enumerate(files))]
            )
        text = Feature(name="text", dtype="string", encoding="bytes")
        self.features = (text, *label_features(self._classes))
        unit = "files" if whole_files else "lines"
        mark = fingerprint(files, folder, contents=True)
        self.description = f"text, {len(self)} {unit} of {len(files)} files {mark}"

    def __len__(self) -> int:
        return len(self._lines)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        for number in numbers:
            file, offset = self._lines[number]
            path = self._files[file]
            name = path.relative_to(self._folder)
            with path.open("rb") as opened:
                opened.seek(offset)
                text = opened.read() if self._whole_files else opened.readline().rstrip(b"\r\n")
            example: dict[str, object] = {"text": text, "file": str(name)}
            if self._classes:
                example["label"] = self._classes.index(name.parts[0])
            yield example


def open_source(location: str, options: Options) -> Source:
    """Opens text."""
    path = Path(location)
    if path.is_dir():
        return Text(path, files_below(path, _SUFFIXES), options.whole_files)
    return Text(path.parent, [path], options.whole_files)


def _lines(number: int, file: Path) -> np.ndarray:
    """Returns the file's number and the offset of each of its lines, int64 `(lines, 2)`."""
    offset, found = 0, []
    with file.open("rb") as opened:
        for line in opened:
            if line.strip():
                found.append((number, offset))
            offset += len(line)
    return np.array(found, np.int64).reshape(-1, 2)
