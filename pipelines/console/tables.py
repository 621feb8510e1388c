"""What the commands print of a folder of shards: tables. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from pipelines.format.feature import Feature
from pipelines.format.index import Index

_NUM_LABELS_NAMED = 4


def summary(index: Index, directory: Path) -> None:
    """Prints what a folder holds: its size, then its features."""
    counts = [shard.num_records for shard in index.shards]
    sizes = [shard.num_bytes for shard in index.shards]
    facts(
        {
            "folder": str(directory),
            "source": index.source,
            "records": f"{index.num_records:,}",
            "shards": f"{index.num_shards}, {_range(counts)} records and "
            f"{decimal(min(sizes, default=0))} to {decimal(max(sizes, default=0))} each",
            "size": decimal(index.num_bytes),
            "compression": index.compression or "none",
        }
    )
    table(
        ("feature", "dtype", "shape", "encoding", "labels"),
        ((f.name, f.dtype, _shape(f), f.encoding, _labels(f)) for f in index.features),
    )


def facts(rows: dict[str, str]) -> None:
    """Prints names and values."""
    grid = Table(show_header=False)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, value)
    _print(grid)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints rows below a header."""
    grid = Table(*header)
    for row in rows:
        grid.add_row(*row)
    _print(grid)


def _print(grid: Table) -> None:
    Console(highlight=False, markup=False).print(grid)


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts, default=0), max(counts, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _shape(feature: Feature) -> str:
    return " x ".join("?" if dim is None else str(dim) for dim in feature.shape) or "scalar"


def _labels(feature: Feature) -> str:
    names = feature.label_names
    if not names:
        return ""
    shown = ", ".join(names[:_NUM_LABELS_NAMED])
    return f"{len(names)}: {shown}" + (", ..." if len(names) > _NUM_LABELS_NAMED else "")
