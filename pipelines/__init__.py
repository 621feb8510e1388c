"""TFRecord pipelines: write sharded data sets with an index, and read them as batches.

A `Feature` describes one field of a record and an `Index` describes a folder of shards.
`write_shards` writes a folder atomically, and `read` returns it as a `tf.data.Dataset`. The package
does not need `tfdist`. Importing it does not import TensorFlow, so that commands answer `--help`
at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.errors import DataError as DataError
    from pipelines.format.feature import Feature as Feature
    from pipelines.format.index import Index as Index
    from pipelines.format.index import Shard as Shard
    from pipelines.format.index import load_index as load_index
    from pipelines.pack.packing import pack_dataset as pack_dataset
    from pipelines.reading.mixture import Source as Source
    from pipelines.reading.mixture import mix as mix
    from pipelines.reading.position import Position as Position
    from pipelines.reading.position import Record as Record
    from pipelines.reading.position import Restart as Restart
    from pipelines.reading.position import peek as peek
    from pipelines.reading.position import restart_of as restart_of
    from pipelines.reading.read import read as read
    from pipelines.reading.tuning import Tuning as Tuning
    from pipelines.reading.tuning import without_autotuning as without_autotuning
    from pipelines.sources.account import Account as Account
    from pipelines.sources.account import load_account as load_account
    from pipelines.sources.source import list_files as list_files
    from pipelines.sources.splits import find_splits as find_splits
    from pipelines.sources.table_files import read_table as read_table
    from pipelines.writing import write_shards as write_shards

_ATTRIBUTES = {
    "Account": "pipelines.sources.account",
    "DataError": "pipelines.errors",
    "Feature": "pipelines.format.feature",
    "Index": "pipelines.format.index",
    "Position": "pipelines.reading.position",
    "Record": "pipelines.reading.position",
    "Restart": "pipelines.reading.position",
    "Shard": "pipelines.format.index",
    "Source": "pipelines.reading.mixture",
    "Tuning": "pipelines.reading.tuning",
    "find_splits": "pipelines.sources.splits",
    "list_files": "pipelines.sources.source",
    "load_account": "pipelines.sources.account",
    "load_index": "pipelines.format.index",
    "peek": "pipelines.reading.position",
    "mix": "pipelines.reading.mixture",
    "pack_dataset": "pipelines.pack.packing",
    "read": "pipelines.reading.read",
    "read_table": "pipelines.sources.table_files",
    "restart_of": "pipelines.reading.position",
    "without_autotuning": "pipelines.reading.tuning",
    "write_shards": "pipelines.writing",
}

__all__ = sorted(_ATTRIBUTES)


def __getattr__(name: str) -> Any:
    """Loads a public name on its first use (PEP 562)."""
    if name in _ATTRIBUTES:
        value = getattr(importlib.import_module(_ATTRIBUTES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pipelines' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
