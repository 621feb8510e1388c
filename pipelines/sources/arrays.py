"""NumPy arrays: an `.npz`, one `.npy`, or a folder of `.npy` files with one feature each.

The first dimension of every array is the example. Arrays of `.npy` files are memory-mapped; those
of an `.npz`, or in an object store, are loaded by every worker.
"""

from __future__ import annotations

import functools
import io
import typing
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format.feature import DType, Feature
from pipelines.sources import splits
from pipelines.sources.source import (
    Example,
    Options,
    Source,
    files_below,
    fingerprint,
    has_suffix,
    is_folder,
)
from pipelines.storage import AnyPath

OPTIONS = frozenset({"split"})
SUFFIXES = frozenset({".npy"})


def fits(location: str) -> bool:
    """Returns whether the location is an `.npz`, an `.npy`, or a folder of `.npy` files."""
    path = storage.at(location)
    return (
        bool(files_below(path, {".npy"})) if is_folder(path) else has_suffix(path, (".npy", ".npz"))
    )


class Arrays(Source):
    """Rows of arrays as examples. The features have the names of the arrays."""

    def __init__(self, path: AnyPath, split: str | None = None) -> None:
        self._path, self._split = path, split
        lengths = {name: len(array) if array.ndim else 0 for name, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{path}: expected arrays with the same number of rows, got {lengths}")
        self._length = next(iter(lengths.values()), 0)
        self.features = tuple(_feature(path, name, a) for name, a in self._arrays.items())
        files, root = _files(path)
        self.files = files
        self.description = f"arrays, {self._length} rows {fingerprint(files, root, contents=True)}"
        self.description += f", {split}" if split else ""
        left_out = [name for name in _load(path) if name not in self._arrays]
        self.account.leave_out("arrays", f"not in the split {split}", *left_out)
        self.account.use("arrays", len(self._arrays))

    def __len__(self) -> int:
        return self._length

    def examples(self, numbers: Sequence[int]) -> Iterator[Example]:
        for number in numbers:
            rows = {name: array[number] for name, array in self._arrays.items()}
            yield {n: row.tolist() if row.dtype.kind in "US" else row for n, row in rows.items()}

    @functools.cached_property
    def _arrays(self) -> Mapping[str, np.ndarray]:
        return _of_split(self._path, _load(self._path), self._split)


def _of_split(
    path: AnyPath, arrays: dict[str, np.ndarray], split: str | None
) -> dict[str, np.ndarray]:
    """Returns the arrays of a split, such as `x_train` and `y_train`, or all if there are none."""
    by_split = splits.by_words(arrays)
    if split or (len(by_split) > 1 and len({len(a) for a in arrays.values() if a.ndim}) > 1):
        return {n: arrays[n] for n in by_split[splits.choose(str(path), by_split, split)]}
    return arrays


def open_source(location: str, options: Options) -> Source:
    """Opens arrays."""
    return Arrays(storage.at(location), options.split)


def _files(path: AnyPath) -> tuple[list[AnyPath], AnyPath]:
    if is_folder(path):
        return files_below(path, {".npy"}), path
    return [path], path if isinstance(path, Path) else path.parent


def _load(path: AnyPath) -> dict[str, np.ndarray]:
    files, _ = _files(path)
    arrays: dict[str, np.ndarray] = {}
    for file in files:
        if file.stem in arrays:
            raise DataError(
                f"{path}: several arrays are called {file.name}, which names their feature; rename "
                "them, or stack the arrays of one feature in one file"
            )
        try:
            if has_suffix(file, (".npz",)):
                with np.load(io.BytesIO(file.read_bytes())) as archive:
                    arrays.update(archive)
            elif isinstance(file, Path):
                arrays[file.stem] = np.load(file, mmap_mode="r")
            else:
                arrays[file.stem] = np.load(io.BytesIO(file.read_bytes()))
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{file}: not NumPy arrays of numbers or text: {error}") from None
    return arrays


def _feature(path: AnyPath, name: str, array: np.ndarray) -> Feature:
    shape = array.shape[1:]
    if array.dtype.kind in "US":
        return Feature(name=name, dtype="string", shape=shape, encoding="bytes")
    dtype = array.dtype.name
    if 0 in shape:
        raise DataError(f"{path}: array {name!r} has the shape {array.shape}: rows without values")
    if dtype not in typing.get_args(DType):
        raise DataError(f"{path}: array {name!r}: cannot store {dtype}; convert the array")
    # Other readers understand lists, but for large arrays raw bytes are cheaper.
    encoding = "raw" if shape or dtype == "float64" else "list"
    return Feature.model_validate(
        {"name": name, "dtype": dtype, "shape": shape, "encoding": encoding}
    )
