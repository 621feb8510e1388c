"""TFRecord pipelines: sharded files with an index beside them, and the way back to batches.

`schema` says what a record holds, `index` what a folder holds, `write_shards` fills a folder
atomically, `read` turns it into a `tf.data.Dataset`. Nothing here needs `tfdist`, and naming this
package imports no TensorFlow: commands answer `--help` at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.errors import DataError as DataError
    from pipelines.feature import Feature as Feature
    from pipelines.index import Index as Index
    from pipelines.index import Shard as Shard
    from pipelines.index import load_index as load_index
    from pipelines.mixture import Source as Source
    from pipelines.mixture import mix as mix
    from pipelines.position import Position as Position
    from pipelines.reader import read as read
    from pipelines.tuning import Tuning as Tuning
    from pipelines.write import write_shards as write_shards

_ATTRIBUTES = {
    "DataError": "pipelines.errors",
    "Feature": "pipelines.feature",
    "Index": "pipelines.index",
    "Position": "pipelines.position",
    "Shard": "pipelines.index",
    "Source": "pipelines.mixture",
    "Tuning": "pipelines.tuning",
    "load_index": "pipelines.index",
    "mix": "pipelines.mixture",
    "read": "pipelines.reader",
    "write_shards": "pipelines.write",
}

__all__ = [
    "DataError",
    "Feature",
    "Index",
    "Position",
    "Shard",
    "Source",
    "Tuning",
    "load_index",
    "mix",
    "read",
    "write_shards",
]


def __getattr__(name: str) -> Any:
    """Loads a public name on its first use (PEP 562)."""
    if name in _ATTRIBUTES:
        value = getattr(importlib.import_module(_ATTRIBUTES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'pipelines' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
