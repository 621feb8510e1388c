"""pyarrow, imported when it is first used: it is optional, and slow to import.

The modules are `pa` (pyarrow), `pc` (its compute functions), `csv`, `dataset`, `ipc` and `parquet`.
"""

from __future__ import annotations

import importlib
from typing import Any

from pipelines.errors import DataError


class _Module:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(importlib.import_module(self._name), name)
        except ImportError:
            raise DataError("tables require pyarrow: pip install pyarrow") from None


pa, pc = _Module("pyarrow"), _Module("pyarrow.compute")
csv, dataset, ipc, parquet = (
    _Module(f"pyarrow.{name}") for name in ("csv", "dataset", "ipc", "parquet")
)
