"""Text files, with or without class folders. An example is a line or a whole file.

Blank lines are skipped. The bytes are stored unchanged, without line ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipelines import storage
from pipelines.format.feature import Feature
from pipelines.sources.account import printable
from pipelines.sources.images import label_features
from pipelines.sources.source import (
    Example,
    Options,
    Source,
    class_names,
    files_below,
    fingerprint,
    has_files,
    is_folder,
)
from pipelines.storage import AnyPath

OPTIONS = frozenset({"whole_files"})
_SUFFIXES = SUFFIXES = frozenset({".txt", ".text", ".jsonl", ".md"})


def fits(location: str) -> bool:
    """Returns whether the location is a text file or a folder of them."""
    return has_files(location, _SUFFIXES)


class Text(Source):
    """Lines or whole files, with file name and class."""

    def __init__(self, folder: AnyPath, files: Sequence[AnyPath], whole_files: bool) -> None:
        self._folder, self._files, self._whole_files = folder, list(files), whole_files
        self.files = self._files
        self._classes = class_names(files, folder)
        if whole_files:
            self._lines = np.array([(i, 0, 0) for i in range(len(files))], np.int64).reshape(-1, 3)
        else:
            self._lines = np.concatenate(
                [np.empty((0, 3), np.int64), *(_lines(i, file) for i, file in enumerate(files))]
            )
        text = Feature(name="text", dtype="string", encoding="bytes")
        self.features = (text, *label_features(self._classes))
        unit = "files" if whole_files else "lines"
        mark = fingerprint(files, folder, contents=True)
        self.description = f"text, {len(self)} {unit} of {len(files)} files {mark}"

    def __len__(self) -> int:
        return len(self._lines)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        lines = [self._lines[number] for number in numbers]
        texts = storage.in_order(self._text, lines, self._folder)
        for (file, _, _), text in zip(lines, texts, strict=True):
            name = storage.relative(self._files[file], self._folder)
            example: dict[str, object] = {"text": text, "file": str(name)}
            if self._classes:
                example["label"] = self._classes.index(printable(name.parts[0]))
            yield example

    def _text(self, line: np.ndarray) -> bytes:
        file, offset, length = line.tolist()
        if self._whole_files:
            return self._files[file].read_bytes()
        data = storage.read_range(self._files[file], offset, offset + length)
        return data.rstrip(b"\r\n")


def open_source(location: str, options: Options) -> Source:
    """Opens text."""
    path = storage.at(location)
    if is_folder(path):
        return Text(path, files_below(path, _SUFFIXES), options.whole_files)
    return Text(path.parent, [path], options.whole_files)


def _lines(number: int, file: AnyPath) -> np.ndarray:
    """Returns file, offset and length of each line that is not blank, int64 `(lines, 3)`."""
    offset, found = 0, []
    with file.open("rb") as opened:
        for line in opened:
            if line.strip():
                found.append((number, offset, len(line)))
            offset += len(line)
    return np.array(found, np.int64).reshape(-1, 3)
