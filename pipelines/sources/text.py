"""Text files, with or without class folders. An example is a line or a whole file.

Blank lines are skipped. The bytes of UTF-8 are stored unchanged, without line ends; other encodings
are converted to UTF-8.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from pipelines import storage
from pipelines.format.feature import Feature
from pipelines.sources.account import Account, printable
from pipelines.sources.encodings import (
    UTF8,
    Encoding,
    decoding_error,
    encoding_of,
    open_bytes,
    open_text,
    unpacked,
    with_compressed,
)
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

OPTIONS = frozenset({"whole_files", "encoding", "classes"})
_OBJECTS = with_compressed(".jsonl")  # tables, unless the user chooses --from text
SUFFIXES = with_compressed(".txt", ".text", ".md") | _OBJECTS


def fits(location: str) -> bool:
    """Returns whether the location is a text file or a folder of them."""
    return has_files(location, SUFFIXES - _OBJECTS)


class Text(Source):
    """Lines or whole files, with file name and class."""

    def __init__(self, folder: AnyPath, files: Sequence[AnyPath], options: Options) -> None:
        self._folder, self._whole_files = folder, options.whole_files
        self._files = self.files = list(files)
        self._given = options.encoding
        self._classes = class_names(
            files, folder, self.account, options.classes, loose_allowed=True
        )
        self._encodings: list[Encoding] = []
        if self._whole_files:
            self._lines = np.array([(i, 0, 0) for i in range(len(files))], np.int64).reshape(-1, 3)
        else:
            self._lines = self._find_lines()
        text = Feature(name="text", dtype="string", encoding="bytes")
        self.features = (text, *label_features(self._classes))
        unit = "files" if self._whole_files else "lines"
        mark = fingerprint(files, folder, contents=True)
        self.description = f"text, {len(self)} {unit} of {len(files)} files {mark}"
        self.description += f", read as {self._given}" if self._given else ""

    def __len__(self) -> int:
        return len(self._lines)

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        lines = [self._lines[number] for number in numbers]
        texts = storage.in_order(self._text, lines, self._folder)
        for (file, _, _), (text, encoding) in zip(lines, texts, strict=True):
            name = storage.relative(self._files[file], self._folder)
            if self._whole_files:
                self._report(self.changes, encoding, name)
                if not text.strip():
                    self.changes.change("files", "without text", name)
            example: dict[str, object] = {"text": text, "file": str(name)}
            if self._classes:
                example["label"] = self._classes.index(printable(name.parts[0]))
            yield example

    def _text(self, line: np.ndarray) -> tuple[bytes, Encoding]:
        number, offset, length = line.tolist()
        file = self._files[number]
        if self._whole_files:
            data = open_bytes(file).read()
            encoding = encoding_of(file, self._given, data)
            return self._decoded(data[encoding.start :], encoding, file), encoding
        if (contents := self._contents(number)) is None:
            data = storage.read_range(file, offset, offset + length)
        else:
            data = contents[offset : offset + length]
        encoding = self._encodings[number]
        return self._decoded(data, encoding, file).rstrip(b"\r\n"), encoding

    def _contents(self, number: int) -> bytes | None:
        if number not in self._unpacked:
            self._unpacked[number] = unpacked(self._files[number])
        return self._unpacked[number]

    @functools.cached_property
    def _unpacked(self) -> dict[int, bytes | None]:
        return {}

    def _decoded(self, data: bytes, encoding: Encoding, file: AnyPath) -> bytes:
        if encoding.name == UTF8:
            return data
        try:
            return data.decode(encoding.name).encode()
        except UnicodeError as error:
            raise decoding_error(file, error) from None

    def _find_lines(self) -> np.ndarray:
        """Returns file, offset and length of each line that is not blank, int64 `(lines, 3)`."""
        parts, blank, returns = [np.empty((0, 3), np.int64)], [], []
        for number, file in enumerate(self._files):
            encoding = encoding_of(file, self._given)
            self._encodings.append(encoding)
            name = storage.relative(file, self._folder)
            self._report(self.account, encoding, name)
            lines, skipped, with_return = _lines(number, file, encoding)
            parts.append(lines)
            blank += [name] * skipped
            returns += [name] * with_return
        lines = np.concatenate(parts)
        self.account.use("lines", len(lines))
        self.account.leave_out("lines", "blank", *blank)
        change = "with a carriage return inside, which does not end a line"
        self.account.change("lines", change, *returns, guessed=True)
        return lines

    def _report(self, account: Account, encoding: Encoding, name: object) -> None:
        if encoding.note:
            account.change("files", encoding.note, name, guessed=encoding.is_guessed)


def open_source(location: str, options: Options) -> Source:
    """Opens text."""
    path = storage.at(location)
    if is_folder(path):
        return Text(path, files_below(path, SUFFIXES), options)
    return Text(path.parent, [path], options)


def _lines(number: int, file: AnyPath, encoding: Encoding) -> tuple[np.ndarray, int, int]:
    """Returns file, offset and length of each line that is not blank, and the number of others.

    The third result is the number of lines with a carriage return before their end.
    """
    offset, lines, num_blank, num_returns = encoding.start, [], 0, 0
    for line, length in _lengths(file, encoding):
        if line.strip():
            lines.append((number, offset, length))
            num_returns += (b"\r" in line[:-2]) if isinstance(line, bytes) else "\r" in line[:-2]
        else:
            num_blank += 1
        offset += length
    return np.array(lines, np.int64).reshape(-1, 3), num_blank, num_returns


def _lengths(file: AnyPath, encoding: Encoding) -> Iterator[tuple[bytes | str, int]]:
    if encoding.name == UTF8:
        with open_bytes(file) as opened:
            opened.seek(encoding.start)
            yield from ((line, len(line)) for line in opened)
        return
    try:
        with open_text(file, encoding, newline="\n") as text:
            yield from ((line, len(line.encode(encoding.name))) for line in text)
    except UnicodeError as error:
        raise decoding_error(file, error) from None
