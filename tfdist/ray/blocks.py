"""The blocks of Ray Data datasets, and what an actor sends of them to its worker's process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple


class Blocks(NamedTuple):
    """An executed dataset, in Ray's object store.

    Attributes:
        refs: References to Arrow tables.
        sizes: Number of rows of each.
    """

    refs: tuple[Any, ...]
    sizes: tuple[int, ...]

    def slices(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Yields the blocks that contain the rows from `start` to `stop`, and their rows in it."""
        ends = itertools.accumulate(self.sizes)
        for ref, size, end in zip(self.refs, self.sizes, ends, strict=True):
            first, last = max(start - end + size, 0), min(stop - end + size, size)
            if first < last:
                yield ref, first, last

    def rows(self, start: int, stop: int, num_rows: int) -> Iterator[dict[str, Any]]:
        """Yields arrays of at most `num_rows` rows, by column."""
        import ray
        from ray.data.block import BlockAccessor

        for ref, first, last in self.slices(start, stop):
            table = ray.get(ref)
            for begin in range(first, last, num_rows):
                rows = table.slice(begin, min(num_rows, last - begin))
                yield BlockAccessor.for_block(rows).to_numpy()


def execute(datasets: Mapping[str, Any]) -> dict[str, Blocks]:
    """Executes Ray datasets, by name, and returns where their rows are."""
    import ray

    size_of = ray.remote(num_cpus=0)(lambda table: table.num_rows)
    refs = {name: dataset.to_arrow_refs() for name, dataset in datasets.items()}
    sizes = {name: ray.get([size_of.remote(ref) for ref in refs[name]]) for name in refs}
    return {name: Blocks(tuple(refs[name]), tuple(sizes[name])) for name in refs}


def send_rows(connection: Connection, datasets: Mapping[str, Blocks]) -> None:
    """Receives a request, and sends the dataset's number of rows, the rows, and an empty message.

    Sends a message with the reason instead if they cannot be read.
    """
    with connection, contextlib.suppress(OSError, EOFError):  # the worker reads no further
        name, start, stop, num_rows = connection.recv()
        if name not in datasets:
            known = ", ".join(sorted(datasets)) or "none"
            connection.send(f"tfdist.ray.train got no dataset {name!r}, only: {known}.")
            return
        connection.send(sum(datasets[name].sizes))
        try:
            for rows in datasets[name].rows(start, stop, num_rows):
                connection.send(rows)
        except Exception as error:  # of Ray: a node with a block was lost
            if isinstance(error, OSError):
                raise
            connection.send(f"Rows of the Ray dataset {name!r} cannot be read: {error}")
        connection.send({})
