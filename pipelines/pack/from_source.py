"""Packing from Python what `python -m pipelines.pack` packs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.console import parallel_tasks

if TYPE_CHECKING:
    from pipelines.format.compression import Compression
    from pipelines.format.index import Index


def packed(
    location: str,
    directory: str | Path,
    *,
    kind: str = "auto",
    num_shards: int | None = None,
    seed: int | None = 0,
    compression: Compression = "",
    num_workers: int | None = None,
    **of_source: object,
) -> Index:
    """Packs a data set into a folder of shards, or re-uses the folder where it holds them already.

    Args:
        location: a folder, a file or `tfds:NAME`.
        directory: the folder to make; its parents are made too.
        kind: one of `pipelines.sources.SOURCES`, or `auto` to find out.
        num_shards: files to write; None: as many as make them 100 MB each.
        seed: of the order of the examples; None: that of the source.
        compression: of the files.
        num_workers: processes that write; None: one a core.
        **of_source: what only some sources take, as `pipelines.sources.source.Options` has it.

    Returns:
        The index of the folder.

    Raises:
        DataError: there is nothing that can be packed, or the folder holds something else.
    """
    from pipelines.pack import sizing
    from pipelines.pack.packing import pack
    from pipelines.pack.plan import Plan
    from pipelines.sources import open_source
    from pipelines.sources.source import Options

    source = open_source(location, kind, Options.model_validate(of_source))
    plan = Plan(
        source,
        num_shards=num_shards or sizing.num_shards(source),
        seed=seed,
        compression=compression,
    )
    return pack(plan, Path(directory), num_workers or parallel_tasks.default_num_workers())
