"""Files of weights, of which each process reads the elements of its shards alone."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import keras
import ml_dtypes
import numpy as np
import tensorflow as tf
from keras.src.saving import saving_lib

from tfdist.upstream.keras_variables import (
    ShardedVariable,
    is_in_parts,
    weights_of_files_on_disk,
)
from tfdist.upstream.patching import all_replaced

#: Whether the installed Keras opens files so that this process can read its part of them.
READS_PIECES = hasattr(saving_lib.H5IOStore, "_get_h5_file")
#: Smaller arrays are read at once.
_SMALL = 4096
_SAFETENSORS: Any = find_spec("safetensors") and import_module("safetensors")
#: Formats of safetensors that are read in pieces.
_FORMATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class FileArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array in a file. Whatever is done with it is done with a copy in memory.

    Args:
        mapped: The array, mapped into memory.
        path: The file, by whose size and time of change other processes know that it is theirs.

    Attributes:
        identity: The same text in each process that reads the same array of the same file.
    """

    def __init__(self, mapped: np.ndarray, path: str) -> None:
        self._mapped, self.shape, self.dtype = mapped, mapped.shape, mapped.dtype
        stat = Path(path).stat()
        where = getattr(mapped, "offset", 0), self.shape, self.dtype
        self.identity = repr((stat.st_size, stat.st_mtime_ns, *where))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # a view would change, or end the process, with the file
        return np.array(self._mapped, dtype)

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if any(isinstance(one, FileArray) for one in options.get("out", ())):
            del options["out"]  # of `array += 1`, which binds the name to what this returns
        arrays = (np.asarray(one) if isinstance(one, FileArray) else one for one in inputs)
        return getattr(function, method)(*arrays, **options)

    def __getitem__(self, key: Any) -> Any:
        return np.array(self._mapped[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._mapped = np.array(self._mapped)
        self._mapped[key] = value

    def __len__(self) -> int:
        return len(self._mapped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.array(self._mapped), name)

    def elements(self, begin: int, end: int) -> np.ndarray:
        """Returns a copy of a range of the flattened array; reads only the rows that have it."""
        rows = self._mapped
        while rows.ndim > 1:
            width = rows[0].size
            first, last = begin // width, -(-end // width)
            begin, end = begin - first * width, end - first * width
            if last - first > 1:
                return rows[first:last].reshape(-1)[begin:end].copy()
            rows = rows[first]
        return rows[begin:end].copy()


class _Safetensors:
    """An open file of safetensors whose arrays are mapped: views of them are read in pieces."""

    def __init__(self, file: Any, path: Any) -> None:
        self._file, self._path = file, path
        with Path(path).open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            self._entries, self._begin = json.loads(opened.read(size)), 8 + size

    def __enter__(self) -> _Safetensors:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> np.ndarray:
        entry = self._entries.get(name, {})
        if entry.get("dtype") not in _FORMATS or not all(entry["shape"]):
            return self._file.get_tensor(name)
        begin, shape = self._begin + entry["data_offsets"][0], tuple(entry["shape"])
        return np.memmap(self._path, _FORMATS[entry["dtype"]], "c", begin, shape)


class _Member(io.FileIO):
    """An uncompressed file within a zip archive."""

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
        super().__init__(str(archive.filename))
        self.begin, self._size = 0, info.file_size
        self.seek(info.header_offset + 26)
        self.begin = info.header_offset + 30 + sum(struct.unpack("<HH", self.read(4)))
        self.seek(0)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            return super().seek(offset, whence) - self.begin
        return super().seek(self.begin + offset + (whence and self._size)) - self.begin

    def tell(self) -> int:
        return super().tell() - self.begin


def _open(store: saving_lib.H5IOStore, path: Any, mode: str | None = None) -> h5py.File:
    """Opens a file of weights; Keras copies one in an archive to a file or into memory."""
    archive, mode = store.archive, mode or store.mode
    if not archive or mode != "r":
        return h5py.File(path, mode)
    info = archive.getinfo(str(path))
    is_file = info.compress_type == zipfile.ZIP_STORED and Path(archive.filename or "").is_file()
    store.io_file = _Member(archive, info) if is_file else io.BytesIO(archive.read(info))
    return h5py.File(store.io_file, mode)


def _file_array(store: saving_lib.H5IOStore, key: str) -> FileArray | None:
    """Returns an entry of an open file if it is large, and its bytes are there as they are."""
    group, member = store._h5_entry_group, store.io_file
    if member is not None and not isinstance(member, _Member):
        return None
    if key not in group or not isinstance(group.get(key, getlink=True), h5py.HardLink):
        return None
    entry = group[key]
    begin = entry.id.get_offset() if isinstance(entry, h5py.Dataset) else None
    if begin is None or entry.external or entry.nbytes < _SMALL:
        return None
    path, before = (member.name, member.begin) if member else (store.h5_file.filename, 0)
    is_bfloat16 = entry.attrs.get("dtype") == "bfloat16"
    dtype = np.dtype(ml_dtypes.bfloat16) if is_bfloat16 else entry.dtype
    return FileArray(np.memmap(path, dtype, "r", before + begin, entry.shape), path)


def _unknown(model: Any) -> bool:
    raise NotImplementedError("Keras then opens the weights in the archive itself.")


@contextmanager
def read_in_pieces(
    pieces_of: Callable[[ShardedVariable, FileArray], Sequence[np.ndarray] | None],
) -> Iterator[None]:
    """A context in which files of weights are loaded into the shards of this process.

    Args:
        pieces_of: Returns the shards of this process of an array in a file, or None to assign the
            whole array.
    """
    if not READS_PIECES:
        with weights_of_files_on_disk():
            yield
        return
    assign, get = keras.Variable.assign, saving_lib.H5IOStore.__getitem__

    safe_open: Any = getattr(_SAFETENSORS, "safe_open", None)

    def assign_pieces(variable: keras.Variable, value: Any) -> Any:
        if isinstance(value, np.memmap) and value.filename is not None:
            value = FileArray(value, value.filename)
        if not isinstance(value, FileArray):
            return assign(variable, value)
        if is_in_parts(variable) and tuple(variable.shape) == value.shape:
            pieces = pieces_of(variable, value)
            if pieces is not None:
                for part, piece in zip(variable.parts, pieces, strict=True):
                    with tf.device(part.device):
                        part.assign(tf.cast(piece, part.dtype))
                return value
        return assign(variable, np.asarray(value))

    def get_array(store: saving_lib.H5IOStore, key: str) -> Any:
        array = _file_array(store, key)
        return get(store, key) if array is None else array

    def open_file(path: Any, framework: str, *args: Any, **options: Any) -> Any:
        file = safe_open(path, framework, *args, **options)
        return _Safetensors(file, path) if framework == "np" else file

    with (
        all_replaced(keras.Variable, {"assign": assign_pieces}),
        all_replaced(_SAFETENSORS, {"safe_open": open_file} if safe_open else {}),
        all_replaced(saving_lib, {"is_memory_sufficient": _unknown}),
        all_replaced(saving_lib.H5IOStore, {"__getitem__": get_array, "_get_h5_file": _open}),
    ):
        yield
