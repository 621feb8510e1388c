"""The table of record offsets (`offsets.npz`), which lets reading start at any record.

The table is stored in the folder of the shards, so that they are scanned only once. Compressed
shards have no table, because they can only be decompressed from the beginning.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipelines import storage
from pipelines.errors import DataError
from pipelines.format import record_file
from pipelines.format.index import Index, Shard
from pipelines.storage import AnyPath, RemotePath

OFFSETS_NAME = "offsets.npz"
_log = logging.getLogger("pipelines")
_NUM_FILES_AT_ONCE = 8  # scanning waits for the disk more than it computes


def load(directory: str | AnyPath, index: Index) -> np.ndarray:
    """Returns the byte offset of each record in its file, shard by shard, int64 `(num_records,)`.

    Creates the table if the folder has none.

    Raises:
        DataError: There is no table, and a file is damaged or has another number of records than
            the index lists.
    """
    folder = storage.at(directory)
    table = _load(folder / OFFSETS_NAME, index)
    if table is None:
        table = scan(folder, index)
        # A read-only folder is scanned at every start. In a bucket, errors are `DataError`s.
        with contextlib.suppress(OSError, DataError):
            store(folder, index, table)
    return table


def scan(folder: AnyPath, index: Index) -> np.ndarray:
    """Returns the table, as `load` does, from the headers of the records."""
    with ThreadPoolExecutor(_NUM_FILES_AT_ONCE) as pool:
        scanned = list(pool.map(lambda shard: _walk(folder, shard), index.shards))
    return np.concatenate([np.empty(0, np.int64), *scanned])


def store(folder: AnyPath, index: Index, table: np.ndarray) -> None:
    """Writes the table of a folder atomically."""
    data = io.BytesIO()
    np.savez(data, offsets=table, of=np.array(_fingerprint(index)))
    if isinstance(folder, RemotePath):
        (folder / OFFSETS_NAME).write_bytes(data.getvalue())
        return
    temporary = folder / f".{OFFSETS_NAME}.{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            file.write(data.getbuffer())
        temporary.replace(folder / OFFSETS_NAME)
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: AnyPath, index: Index) -> np.ndarray | None:
    """Returns the stored table, or None if it is missing, damaged or belongs to other shards."""
    try:
        # Errors of an object store are raised: to scan all shards instead could take hours.
        data = path.read_bytes()
    except OSError:
        return None
    # NumPy does not document what it raises for a damaged archive: zip, pickle and key errors.
    with contextlib.suppress(Exception), np.load(io.BytesIO(data), allow_pickle=False) as archive:
        if archive["of"].item() == _fingerprint(index):
            table = archive["offsets"]
            if _is_plausible(table, index):
                return table
            _log.warning("%s does not match the shards; creating it again", path)
    return None


def _is_plausible(table: np.ndarray, index: Index) -> bool:
    """Returns whether a table has an increasing offset within its file for every record.

    Reading also checks that each block of records ends where the next one begins according to the
    table. So no record is read twice or omitted.
    """
    if table.dtype != np.int64 or table.shape != (index.num_records,):
        return False
    begin = 0
    for shard in index.shards:
        offsets = table[begin : begin + shard.num_records]
        begin += shard.num_records
        if len(offsets) and (
            offsets[0] != 0 or offsets[-1] >= shard.num_bytes or np.any(np.diff(offsets) <= 0)
        ):
            return False
    return True


def mismatches(directory: AnyPath, index: Index) -> set[str]:
    """Returns the names of the shards for which the saved table is wrong."""
    table = None if index.compression else _load(directory / OFFSETS_NAME, index)
    if table is None:
        return set()  # reading creates it again
    names, begin = set(), 0
    for shard in index.shards:
        saved = table[begin : begin + shard.num_records]
        begin += shard.num_records
        with contextlib.suppress(DataError, OSError):  # these are reported for the shard itself
            if not np.array_equal(_walk(directory, shard), saved):
                names.add(shard.name)
    return names


def _walk(directory: AnyPath, shard: Shard) -> np.ndarray:
    path = directory / shard.name
    offsets = np.fromiter(record_file.offsets(path), np.int64)
    if len(offsets) != shard.num_records:
        raise DataError(
            f"{path}: the index lists {shard.num_records} records, the file contains "
            f"{len(offsets)}; restore the file, or delete the index and create it again"
        )
    return offsets


def _fingerprint(index: Index) -> str:
    shards = "".join(shard.model_dump_json() for shard in index.shards)
    return hashlib.sha256(shards.encode()).hexdigest()
